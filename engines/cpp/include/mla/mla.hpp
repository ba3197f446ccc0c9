// All of it: open an export, make a context for each thread, generate.
//
//     mla::Model model("out/model");
//     mla::Context context = model.context();
//     mla::Logits logits = context.prefill({{1, 306, 4658}});
//     logits = context.decode({mla::greedy(logits.row(0), logits.vocabulary(), 0, 0)});
#pragma once

#include "mla/generate.hpp"
#include "mla/model.hpp"
