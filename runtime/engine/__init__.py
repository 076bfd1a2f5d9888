"""The model, and how its logits are used.

In this order (`engine/sampling/sampler.py`): repetition, then frequency and presence penalty, `logit_bias`,
logit processor, mask of the constraint, temperature, top-k, top-p, min-p; ties at a cut are kept. A draw
takes the highest remaining score, with Gumbel noise that depends only on seed, step and token id
(`kernels/gumbel.py`). Log-probabilities are those of the logits before all of this (with `scaled_logprobs`,
those of output tokens are divided by the temperature). A step with constrained rows computes its logits in
`finish()`: if the mask lists few ids and no log-probability is needed, only the logits of these ids.

If several processes share a model, each is a `TorchRunner` with the same plans (`runtime/parallel.py`). Small
passes are computed by one thread (`engine/runner.py`).

Seeds are only meaningful if the logits do not depend on the batch. So on CPUs a model is computed in float32
unless bfloat16 is asked for, and attention always is
(`tutorials/decisions/004-attention-in-float32-on-cpu.md`). Matrices have a second, packed copy
(`layers/dense.py`); which of the two a pass of few rows uses is measured when a model is loaded.

The scheduler decides where a generation ends (`stop.py`): stop strings and patterns, end-of-text and stop
ids, `max_new_tokens`, the end of the grammar, in this order per token. The detokenizer turns ids into the
vocabulary's bytes and these into UTF-8 as the tokenizer's own decoder would. Text that was sent never
changes: it holds back the bytes of an unfinished character, a possible beginning of a stop string, and text
that may belong to a stop pattern's match. It keeps the state of at most 65,536 requests.
"""
