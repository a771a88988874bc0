"""Guards of long runs: each in a file of its own, each off or on by `GuardsConfig`, each event logged.

config          what is on, and its thresholds
sentinels       pure functions of the metrics history that say when a run leaves the road
watch           `Guards`: history, verdicts, and which versions were sound
rollback        back to an earlier version, through the update log
reference       when the reference policy is replaced
kl              estimators of the KL to it
groups          groups without signal, and their replacement
measures        repetition and effective sample size
length_penalty  a cosine penalty on a cycle
events          what is written to events.jsonl
"""
