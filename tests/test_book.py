"""What the book finds behind figures and claims; `make book` checks its links."""

from script_files import script


def test_what_is_behind_a_name_is_followed_through_assignments() -> None:
    book = script("docs/book.py")
    cells = [
        "from specnb.theory import solve_alpha as solved\nbase = read_table('results/engines')\nn = 3",
        "def worst(rows):\n    return solved(base)\nrows = []\nrows.append(worst(n))",
        "made = nb.table('made', base.head(n))",
        "plot(rows)\nplot(made)\nplot(n)",
    ]
    (_, engines), (_, made), (_, nothing) = book.lineage(cells, "07")[3]
    assert engines == {("data/results/engines.csv", ""): 2, ("specnb.theory", "solve_alpha"): 1}
    assert made == {("data/results/engines.csv", ""): 2, ("data/results/07_made.csv", ""): 1}
    assert not nothing
