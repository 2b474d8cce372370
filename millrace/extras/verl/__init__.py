"""verl's keys, and what millrace does with each of them.

| kind | meaning |
|---|---|
| mapped | the key has an equal here, under this name or another one |
| needless | millrace accepts the key and ignores it, and says why |
| absent | millrace refuses the key and says what to do. A value that turns the feature off is accepted |

A key that millrace spells like verl stands here only if its values differ. Keys are written without
`actor_rollout_ref.`, unless millrace has another key of the shorter name. `*` matches any text.
(Source: the configurations of verl's PPO, one-step-off and fully-async trainers, commit 1dda039b9.)
"""
