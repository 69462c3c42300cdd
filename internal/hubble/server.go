package hubble

import (
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/fairlead/fairlead/internal/hubble/api/observer"
)

// Service is the path below which the methods of Hubble's API are, as gRPC has it. Who may POST there may see all flows.
const Service = "/observer.Observer/"

// NewServer returns a gRPC server for an Observer, which is also an http.Handler for HTTP/2. Who may ask the caller decides.
func NewServer(o observer.ObserverServer) *grpc.Server {
	s := grpc.NewServer(
		grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(2*maxStreams), grpc.ConnectionTimeout(10*time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Minute, Timeout: 20 * time.Second}),
	)
	observer.RegisterObserverServer(s, o)
	return s
}

var _ http.Handler = (*grpc.Server)(nil)
