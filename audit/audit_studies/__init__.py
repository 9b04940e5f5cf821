"""Long runs whose tables are committed in `audit/data/results`: how good the audit is, and tokens
of released engines.

`power` measures the audit itself, `engines` collects and audits tokens of engines, `acceptance`
serves drafts with known mistakes.
`python -m studies NAME` runs these studies, too. The name is not `studies`: both folders are on one
path, and one name is one package. It is not part of `specnb_audit` either, which is installed, and
does not need pandas, a corpus or another engine.
"""
