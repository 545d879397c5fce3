"""Server reflection under both its names. Its v1 is v1alpha with another package, and the library ships v1alpha only,
so v1 is made from it here: the same messages on the wire, and a description of its own for who asks about it."""

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

_ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_FILE = "grpc/reflection/v1/reflection.proto"

SERVICE_NAMES = (reflection.SERVICE_NAME, f"{_V1}.ServerReflection")


def enable(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds both to `server`; they tell of `services` and of themselves."""
    _describe()
    names = (*services, *SERVICE_NAMES)
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAMES[1], methods),))


def _describe() -> None:
    """Puts v1's file into the pool unless somebody has."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.name, file.package = _FILE, _V1
        for message in file.message_type:
            for field in (field for field in message.field if field.type_name):
                field.type_name = _renamed(field.type_name)
        for method in (method for service in file.service for method in service.method):
            method.input_type, method.output_type = _renamed(method.input_type), _renamed(method.output_type)
        pool.AddSerializedFile(file.SerializeToString())


def _renamed(type_name: str) -> str:
    return type_name.replace(f".{_ALPHA}.", f".{_V1}.")
