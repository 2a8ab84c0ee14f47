"""Packing on the fly: any source of documents to packs, shuffled, mixed, dealt out, and resumed exactly."""

from pack_torch.iterable.dataset import PackedIterable
from pack_torch.iterable.even import EvenPacks, even_packs
from pack_torch.iterable.order import mix, shuffle
from pack_torch.iterable.progress import follow
from pack_torch.iterable.shard import Shard

__all__ = ["EvenPacks", "PackedIterable", "Shard", "even_packs", "follow", "mix", "shuffle"]
