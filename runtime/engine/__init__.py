"""The model and what is done with its logits.

In this order (`engine/sampling/sampler.py`): repetition, then frequency and presence penalty, `logit_bias`,
logit processor, mask of the constraint, temperature, top-k, top-p, min-p; ties at a cut-off are kept. A
draw takes the greatest of what is left, with Gumbel noise that depends on seed, step and token id alone
(`kernels/gumbel.py`). Log-probabilities are those of the logits before all of this (with `scaled_logprobs`,
of output tokens, divided by the temperature). A step with constrained rows computes its logits at
`finish()`: where the mask lists few ids and no log-probability is wanted, only theirs.

Where several processes share a model, each is a `TorchRunner` with the same plans (`runtime/parallel.py`).

Passes too small to be shared out among cores are computed by one thread (`engine/threads.py`).

A seed only means something if the logits do not depend on the batch: on CPU a model is computed in float32
unless bfloat16 is asked for, and attention always
(`tutorials/decisions/004-attention-in-float32-on-cpu.md`). Matrices have a second, packed copy
(`layers/dense.py`); which of the two a pass of one to three rows uses is timed when a model is loaded.

The scheduler decides where a generation ends (`stop.py`): stop strings and patterns, end-of-text and stop
ids, `max_new_tokens`, the end of the grammar, in this order per token. The detokeniser turns ids into the
bytes of the vocabulary and these into UTF-8 as the tokenizer's own decoder would, all at once. What it has
shown never changes: it holds back the bytes of an unfinished character, what may begin a stop string, and
what may belong to a stop pattern's match. At most 65,536 requests have a state there.
"""
