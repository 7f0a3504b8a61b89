"""Typed views of the generated stubs, which carry no annotations."""

from __future__ import annotations

from typing import Protocol, cast

import grpc

from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc, data_pb2, data_pb2_grpc


class DataStub(Protocol):
    """The data service as the client uses it: the session, and the framed streams."""

    Session: grpc.StreamStreamMultiCallable[data_pb2.SessionRequest, data_pb2.SessionReply]
    Put: grpc.StreamUnaryMultiCallable[data_pb2.PutRequest, data_pb2.PutReply]
    Fetch: grpc.UnaryStreamMultiCallable[data_pb2.FetchRequest, data_pb2.FetchReply]
    Open: grpc.UnaryUnaryMultiCallable[data_pb2.OpenRequest, data_pb2.OpenReply]
    Match: grpc.UnaryUnaryMultiCallable[data_pb2.MatchRequest, data_pb2.MatchReply]
    Touch: grpc.UnaryUnaryMultiCallable[data_pb2.TouchRequest, data_pb2.TouchReply]
    Prefetch: grpc.UnaryUnaryMultiCallable[data_pb2.PrefetchRequest, data_pb2.PrefetchReply]
    Cancel: grpc.UnaryUnaryMultiCallable[data_pb2.CancelRequest, data_pb2.CancelReply]
    Renew: grpc.UnaryUnaryMultiCallable[data_pb2.RenewRequest, data_pb2.RenewReply]
    Release: grpc.UnaryUnaryMultiCallable[data_pb2.ReleaseRequest, data_pb2.ReleaseReply]
    Delete: grpc.UnaryUnaryMultiCallable[data_pb2.DeleteRequest, data_pb2.DeleteReply]
    List: grpc.UnaryUnaryMultiCallable[data_pb2.ListRequest, data_pb2.ListReply]
    Reserve: grpc.UnaryUnaryMultiCallable[data_pb2.ReserveRequest, data_pb2.ReserveReply]
    Commit: grpc.UnaryUnaryMultiCallable[data_pb2.CommitRequest, data_pb2.CommitReply]
    Abort: grpc.UnaryUnaryMultiCallable[data_pb2.AbortRequest, data_pb2.AbortReply]


class AdminStub(Protocol):
    """The administration service as tools use it."""

    Status: grpc.UnaryUnaryMultiCallable[admin_pb2.StatusRequest, admin_pb2.StatusReply]
    Namespaces: grpc.UnaryUnaryMultiCallable[admin_pb2.NamespacesRequest, admin_pb2.NamespacesReply]
    Inspect: grpc.UnaryUnaryMultiCallable[admin_pb2.InspectRequest, admin_pb2.InspectReply]
    Segments: grpc.UnaryUnaryMultiCallable[admin_pb2.SegmentsRequest, admin_pb2.SegmentsReply]
    Retention: grpc.UnaryUnaryMultiCallable[admin_pb2.RetentionRequest, admin_pb2.Document]
    Forecast: grpc.UnaryUnaryMultiCallable[admin_pb2.ForecastRequest, admin_pb2.Document]
    HitRate: grpc.UnaryUnaryMultiCallable[admin_pb2.HitRateRequest, admin_pb2.Document]
    Why: grpc.UnaryUnaryMultiCallable[admin_pb2.WhyRequest, admin_pb2.Document]
    Advice: grpc.UnaryUnaryMultiCallable[admin_pb2.AdviceRequest, admin_pb2.Document]
    Purge: grpc.UnaryUnaryMultiCallable[admin_pb2.PurgeRequest, admin_pb2.Document]
    Receipts: grpc.UnaryUnaryMultiCallable[admin_pb2.ReceiptsRequest, admin_pb2.Document]
    Verify: grpc.UnaryStreamMultiCallable[admin_pb2.VerifyRequest, admin_pb2.VerifyReply]


def data_stub(channel: grpc.Channel) -> DataStub:
    """Return the data service's stub on a channel."""
    return cast(DataStub, data_pb2_grpc.DataStub(channel))


def admin_stub(channel: grpc.Channel) -> AdminStub:
    """Return the administration service's stub on a channel."""
    return cast(AdminStub, admin_pb2_grpc.AdminStub(channel))
