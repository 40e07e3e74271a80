"""sentence-transformers: embeddings in small batches, with gradients cached between two passes."""

import common
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from transformers import BertConfig, BertModel

torch.manual_seed(0)
config = BertConfig(
    vocab_size=4000,
    hidden_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=512,
)


class Embedder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(config)

    def forward(self, features):
        hidden = self.bert(features["input_ids"]).last_hidden_state
        return {"sentence_embedding": hidden.mean(1)}


model = SentenceTransformer(modules=[Embedder()], device="cpu").train()
loss_of = CachedMultipleNegativesRankingLoss(model, mini_batch_size=16)
one, other = ({"input_ids": torch.randint(0, 4000, (64, 48))} for _ in range(2))
common.train(model.parameters(), lambda: loss_of([one, other], None), steps=8)
