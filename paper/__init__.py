"""The paper, made of the results and of nothing else: `make paper`.

Rooms, from the ground up; each imports only from those before it:

    reading           results looked up
    numbers, remarks  every number of the paper; every remark that no number carries
    build             what is stale stops it; figures, tables, text
"""
