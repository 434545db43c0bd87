"""Everything that travels between ranks, and how they agree. Group-local ranks everywhere."""

from halotile.comm.agreement import Call, Phase
from halotile.comm.mailbox import Mailbox
from halotile.comm.mailbox_ends import Consumer, Letter, Producer
from halotile.comm.pieces import Delivery, Piece
from halotile.comm.ranks import DEFAULT_TIMEOUT_S, Group, Ranks
from halotile.comm.rows import Arrivals, Deliver, begin_fetch, deliver_rows, empty_rows, fetch_rows, receiving
from halotile.comm.subgroup import SubgroupTransport
from halotile.comm.torch_group import TorchTransport
from halotile.comm.transport import Board, Counters, Exchange, LinkError, Message, Transport
from halotile.comm.virtual import VirtualGroup, VirtualTransport, run_virtual

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Arrivals",
    "Board",
    "Call",
    "Consumer",
    "Counters",
    "Deliver",
    "Delivery",
    "Exchange",
    "Group",
    "Letter",
    "LinkError",
    "Mailbox",
    "Message",
    "Phase",
    "Piece",
    "Producer",
    "Ranks",
    "SubgroupTransport",
    "TorchTransport",
    "Transport",
    "VirtualGroup",
    "VirtualTransport",
    "begin_fetch",
    "deliver_rows",
    "empty_rows",
    "fetch_rows",
    "receiving",
    "run_virtual",
]
