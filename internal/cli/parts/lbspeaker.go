package parts

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	kconnect "github.com/fairlead/fairlead/internal/kernel/connect"
	kiptables "github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb"
	"github.com/fairlead/fairlead/internal/lb/front"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/web"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/systemd"
	"github.com/fairlead/fairlead/internal/table"
)

// Speaker serves load balancers on this node.
type Speaker interface {
	Run(context.Context) error
	Collector() prometheus.Collector
}

// NewSpeaker returns the speaker of this node, which announces addresses and serves the proxied way; with --lb-announce
// none it only serves. p is the proxy of this process, nil if another one runs on the node, and noMesh is as in front.Options.
func (f *LBFlags) NewSpeaker(
	log *slog.Logger, config *rest.Config, nodeName string, at netip.Addr, p *proxy.Proxy, noMesh string,
) (Speaker, error) {
	o := lb.SpeakerOptions{
		Config: config, NodeName: nodeName, Peer: netip.AddrPortFrom(at, f.peerPort), Interfaces: f.interfaces, Log: log,
		Announce: f.announce, BGPPeers: f.bgpPeers, AccessLogs: f.accessLogs, NoMesh: noMesh, Requests: f.Requests,
		Traced: f.Traced,
	}
	var err error
	if o.UploadLogs, err = f.logUpload.options(); err != nil {
		return nil, err
	}
	store, err := systemd.OpenFileStore()
	if err != nil {
		log.Warn("cannot use systemd's file descriptor store; connections may be refused during a restart", "err", err)
	}
	if store != nil {
		o.Store = store
	}
	if f.announce == announceNone {
		return front.NewListening(config, front.Options{
			NodeName: nodeName, Log: log, AccessLogs: o.AccessLogs, UploadLogs: o.UploadLogs, NoMesh: noMesh,
			Server: proxied.New(proxied.Options{
				Log: log, AccessLogs: o.AccessLogs, Node: nodeName, Store: o.Store, Engine: web.Start, Requests: o.Requests,
				Traced: o.Traced,
			}),
		})
	}
	if p != nil {
		o.Healthy = func(context.Context) (bool, string) {
			if p.Serving() {
				return true, ""
			}
			return false, "the node's proxy: " + p.Status().Message
		}
		o.Programmed = func(id svc.PortName, family svc.Family, addr netip.Addr) bool {
			return forwards(p.Table(), id, family, addr)
		}
	}
	o.Leaving = systemd.Leaving
	return lb.NewSpeaker(o)
}

// NoMesh returns why connections to ClusterIPs cannot be led to routes on a node whose proxy has these flags and runs in a
// mode, "" if they can.
func (f *ProxyFlags) NoMesh(mode string) string {
	for _, m := range proxyModes() {
		if m.name == mode && m.noMesh != "" {
			return "the proxy is in mode " + mode + ", " + m.noMesh
		}
	}
	if f.connect.in {
		return "the proxy has --connect-time on or auto, which translates connections before there are packets"
	}
	return ""
}

// lookTimeout bounds the look at the kernel of NoMeshBesides.
const lookTimeout = 10 * time.Second

// NoMeshBesides is NoMesh for the proxy of another process, by what it has in the kernel now.
func NoMeshBesides(ctx context.Context, log *slog.Logger) string {
	others := []proxyMode{{name: "ipvs of kube-proxy", noMesh: firstAtClusterIPs, present: func(context.Context) (bool, error) {
		return link.HasDevice(svc.KubeProxyDevice)
	}}}
	if connected, err := kconnect.Present(""); err != nil {
		log.Warn("cannot find out whether a proxy translates connections when they are made", "err", err)
	} else if connected {
		return "a proxy of this node translates connections when they are made (--connect-time), before there are packets"
	}
	if !kiptables.Installed() {
		log.Info("without iptables tools it cannot be seen whether a proxy of this node is in mode iptables: give the proxy another mode, " +
			"or install them, if routes name Services")
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	for _, m := range append(others, proxyModes()...) {
		if m.noMesh == "" {
			continue
		}
		present, err := m.present(ctx)
		if err != nil {
			log.Warn("cannot find out whether a proxy keeps connections to ClusterIPs from routes", "mode", m.name, "err", err)
		}
		if present {
			return "a proxy of this node is in mode " + m.name + ", " + m.noMesh
		}
	}
	return ""
}

// forwards reports whether a table has an address of a load balancer for a service port.
func forwards(t *table.Table, id svc.PortName, family svc.Family, addr netip.Addr) bool {
	if t == nil {
		return false
	}
	port := t.Get(table.Key{ID: id, Family: family})
	if port == nil {
		return false
	}
	for i := range port.Frontends {
		if f := &port.Frontends[i]; f.Kind == table.LoadBalancerIP && f.Addr.Addr() == addr {
			return true
		}
	}
	return false
}

// SpeakerComponent runs a speaker. It stops before the proxy, so that others announce
// its addresses first, and after DNS, so that its end is close to the process's.
func SpeakerComponent(s Speaker) lifecycle.Component {
	return lifecycle.Component{Name: "speaker", Run: s.Run}
}
