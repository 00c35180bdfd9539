"""llama.cpp as a benchmark worker: python llama_cpp_worker.py FILE.gguf DTYPE SETTING

Through the low-level interface of llama-cpp-python, with all requests in one batch: a prefill of
all prompts, then a row per request that is still running. The type of the KV cache is that of the
file's weights, float32 or float16.

default: a KV cache per sequence, as the library has it. It computes only sequences with consecutive
ids together, so ids go by how long the requests run: those that still do are always 0, 1, 2, ...
tuned: one KV cache for all, which computes any sequences together, and a prefill in passes of BATCH
tokens instead of 512.
"""

import ctypes
import os
import sys

import llama_cpp as lib
import numpy as np
from worker import serve

BATCH = 4096


def main():
    path, dtype, setting = sys.argv[1:]
    lib.llama_backend_init()
    quiet = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(quiet, ctypes.c_void_p())
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def make_context(sequences, tokens):
        p = lib.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_seq_max = sequences * tokens, BATCH, sequences
        p.kv_unified = setting == "tuned"
        p.n_ubatch = BATCH if setting == "tuned" else 512
        p.n_threads = p.n_threads_batch = os.cpu_count()
        p.type_k = p.type_v = lib.GGML_TYPE_F32 if dtype == "float32" else lib.GGML_TYPE_F16
        return lib.llama_init_from_model(model, p)

    def generate(prompts, max_tokens):
        """Longest-running requests first, answers in the caller's order."""
        order = sorted(range(len(prompts)), key=lambda i: -max_tokens[i])
        tokens = run([prompts[i] for i in order], [max_tokens[i] for i in order])
        return [tokens[order.index(i)] for i in range(len(prompts))]

    def run(prompts, max_tokens):
        context = make_context(len(prompts), max(map(len, prompts)) + max(max_tokens) + 8)
        batch = lib.llama_batch_init(BATCH, 0, 1)

        def decode(rows):
            """rows of (token, position, sequence, wanted): the greedy tokens of the wanted rows."""
            batch.n_tokens = len(rows)
            for i, (token, position, sequence, wanted) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                    token,
                    position,
                    1,
                    wanted,
                )
                batch.seq_id[i][0] = sequence
            if lib.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            picked = [i for i, row in enumerate(rows) if row[3]]
            return [
                int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (vocab,)).argmax())
                for i in picked
            ]

        rows = [(t, j, s, j == len(p) - 1) for s, p in enumerate(prompts) for j, t in enumerate(p)]
        out = [[t] for t in decode(rows)]
        for step in range(max(max_tokens) - 1):
            live = [s for s, n in enumerate(max_tokens) if step + 1 < n]
            for s, token in zip(
                live,
                decode([(out[s][-1], len(prompts[s]) + step, s, True) for s in live]),
                strict=True,
            ):
                out[s].append(token)
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        return out

    serve(generate)


main()
