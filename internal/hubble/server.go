package hubble

import (
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/fairlead/fairlead/internal/hubble/api/observer"
	"github.com/fairlead/fairlead/internal/hubble/api/peer"
)

// The paths below which the methods of Hubble's API, and of gRPC's health check, are. Who may POST at Service may see all flows, and
// at Peers the addresses of the nodes.
const (
	Service = "/observer.Observer/"
	Peers   = "/peer.Peer/"
	Health  = "/grpc.health.v1.Health/"
)

// checkedName is what the hubble command asks the health check for.
const checkedName = "hubble.server.Observer"

// API is all of Hubble's API.
type API interface {
	observer.ObserverServer
	peer.PeerServer
}

// NewServer returns a gRPC server, which is also an http.Handler for HTTP/2. The caller decides who may ask.
func NewServer(o API, more ...grpc.ServerOption) *grpc.Server {
	s := grpc.NewServer(append(more,
		grpc.ForceServerCodecV2(newCodec()),
		grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(2*maxStreams), grpc.ConnectionTimeout(10*time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Minute, Timeout: 20 * time.Second}),
	)...)
	observer.RegisterObserverServer(s, o)
	peer.RegisterPeerServer(s, o)
	alive := &aliveServer{health.NewServer(), NewPlaces(maxStreams, "clients watch the health")}
	alive.SetServingStatus(checkedName, healthpb.HealthCheckResponse_SERVING)
	healthpb.RegisterHealthServer(s, alive)
	return s
}

// aliveServer bounds the streams of a health.Server.
type aliveServer struct {
	*health.Server

	watches *Places
}

// Watch is part of healthpb.HealthServer.
func (a *aliveServer) Watch(r *healthpb.HealthCheckRequest, to healthpb.Health_WatchServer) error {
	done, err := a.watches.Take()
	if err != nil {
		return err
	}
	defer done()
	return a.Server.Watch(r, to)
}

var _ http.Handler = (*grpc.Server)(nil)
