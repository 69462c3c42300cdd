// Package lb makes the load balancers' parts that run on a node from their options. README.md lists the packages of
// the parts.
package lb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/lb/bgp"
	"github.com/fairlead/fairlead/internal/lb/front"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/web"
	"github.com/fairlead/fairlead/internal/lb/speaker"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// SpeakerOptions are the options of a Speaker.
type SpeakerOptions struct {
	// Config is how to reach the API. A copy of it is used.
	Config *rest.Config
	// NodeName, Peer, Interfaces, Announce, BGPPeers, Healthy, Programmed, Leaving and Now are as in speaker.Options.
	NodeName   string
	Peer       netip.AddrPort
	Interfaces []string
	Announce   string
	BGPPeers   []bgp.Peer
	Healthy    func(context.Context) (ok bool, reason string)
	Programmed func(id svc.PortName, family svc.Family, addr netip.Addr) bool
	Leaving    func(context.Context) bool
	Now        func() time.Duration
	Log        *slog.Logger // may be nil
	// AccessLogs is the directory of the access logs that Services ask for. Without it none are written.
	AccessLogs string
	// UploadLogs is where they are uploaded to, nil if they are not.
	UploadLogs *front.LogUpload
	// NoMesh is as in front.Options.
	NoMesh string
	// Store, if not nil, keeps the listeners of the proxied way over a restart.
	Store proxied.Store
	// Requests, if not nil, is shown the requests of HTTP in the proxied way.
	Requests seen.Requests
	// Traced, if not nil, keeps what becomes of the requests that users trace.
	Traced *request.Watch
}

// Speaker announces addresses on this node, and serves the Services of the proxied way.
type Speaker struct{ *speaker.Speaker }

// NewSpeaker returns a Speaker that does nothing before Run.
func NewSpeaker(o SpeakerOptions) (Speaker, error) {
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	config := apiclient.Tuned(o.Config, svc.Speaker)
	lb, err := v1.NewClient(config)
	client, err2 := kubernetes.NewForConfig(apiclient.Protobuf(config))
	routes, err3 := api.NewClient(config)
	if err := errors.Join(err, err2, err3); err != nil {
		return Speaker{}, fmt.Errorf("client of a speaker: %w", err)
	}
	recorder := events.NewRecorder(client, corev1.EventSource{Component: svc.Speaker, Host: o.NodeName}, o.Log)
	served := func() {} // set below, before anything runs
	f := &fronted{}
	f.Front = front.New(front.Options{
		NodeName: o.NodeName, Client: client, Gateway: routes, Events: recorder, Log: o.Log, AccessLogs: o.AccessLogs, UploadLogs: o.UploadLogs,
		Server: proxied.New(proxied.Options{
			Log: o.Log, AccessLogs: o.AccessLogs, Node: o.NodeName, Store: o.Store, Engine: web.Start, Requests: o.Requests,
			Traced: o.Traced,
		}),
		Served: func() { served() }, Listed: f.all.Load, NoMesh: o.NoMesh,
	})
	s, err := speaker.New(speaker.Options{
		Client: client, LB: lb, Events: recorder, Log: o.Log, NodeName: o.NodeName, Peer: o.Peer, Interfaces: o.Interfaces,
		Announce: o.Announce, BGPPeers: o.BGPPeers, Healthy: o.Healthy, Programmed: o.Programmed, Front: f, Now: o.Now, Leaving: o.Leaving,
	})
	if err != nil {
		return Speaker{}, err
	}
	served = s.Wake
	f.Register(s.Registry())
	return Speaker{s}, nil
}

// fronted is a Front that the speaker informs when everything has been listed.
type fronted struct {
	*front.Front
	all atomic.Bool
}

// Listed is called by the speaker when Services and claims have been listed.
func (f *fronted) Listed() {
	f.all.Store(true)
	f.Wake()
}

// Collector returns the metrics.
func (s Speaker) Collector() prometheus.Collector { return s.Registry() }
