// Package routes announces the addresses of load balancers by BGP: it follows the BGPPeers of a node, with their
// passwords, and gives them to lb/bgp. Its owner decides which addresses it announces.
package routes

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/bfd"
	"github.com/fairlead/fairlead/internal/lb/bgp"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options are the options of Routes.
type Options struct {
	Client kubernetes.Interface
	LB     *v1.Client
	// Node names this node.
	Node string
	// Peers are the peers of the command line, beside the BGPPeer objects.
	Peers []bgp.Peer
	Log   *slog.Logger
	// Events, if not nil, records Events on BGPPeers.
	Events *events.Recorder
	// Changed, if not nil, is called when what Status returns has changed in a way that
	// its owner reports.
	Changed func()
}

// Routes announces addresses to the BGP peers of a node.
type Routes struct {
	o         Options
	announcer *bgp.Announcer

	mu      sync.Mutex
	ctx     context.Context // of Run
	running *sync.WaitGroup
	begun   bool
	listed  bool
	node    *corev1.Node
	objects map[string]*v1.BGPPeer
	secrets map[string]*followed
	invalid map[string]v1.PeerStatus // of BGPPeers that cannot be used
}

// followed is a Secret with a password.
type followed struct {
	cancel   context.CancelFunc
	listed   bool
	password *string // nil: there is none
}

// New returns Routes that announce nothing before Begin.
func New(o Options) *Routes {
	r := &Routes{o: o, objects: map[string]*v1.BGPPeer{}, secrets: map[string]*followed{}, invalid: map[string]v1.PeerStatus{}}
	r.announcer = bgp.New(bgp.Options{Log: o.Log, NodeName: o.Node, OnChange: r.sessionChanged, OnPath: r.changed})
	return r
}

// Run follows the BGPPeers until ctx ends. Sessions stay until Close.
func (r *Routes) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	r.mu.Lock()
	r.ctx, r.running = ctx, &running
	r.mu.Unlock()
	change := func(f func()) {
		r.mu.Lock()
		defer r.mu.Unlock()
		f()
		r.reconcile()
	}
	reflector.Run(ctx, "lb/bgppeers", reflector.From(r.o.LB.Peers, metav1.ListOptions{}).Defined(), reflector.Sink[*v1.BGPPeer]{
		Replace: func(all []*v1.BGPPeer) {
			change(func() {
				r.listed = true
				clear(r.objects)
				for _, p := range all {
					r.objects[p.Name] = p
				}
			})
		},
		Set:    func(p *v1.BGPPeer) { change(func() { r.objects[p.Name] = p }) },
		Delete: func(p *v1.BGPPeer) { change(func() { delete(r.objects, p.Name) }) },
	})
}

// Announce announces an address with the routes of its pool, nil if it is of none.
func (r *Routes) Announce(address netip.Addr, of *v1.IPAddressPool) {
	if of == nil {
		of = &v1.IPAddressPool{}
	}
	var all []bgp.Attributes
	for _, route := range of.Spec.Routes() {
		attributes, err := attributesOf(&route, address)
		if err != nil {
			r.o.Log.Warn("a pool's BGP attributes cannot be used; announcing without them", "pool", of.Name, "err", err)
		}
		all = append(all, attributes)
	}
	r.announcer.Announce(address, all...)
}

// Withdraw ends the announcement of an address.
func (r *Routes) Withdraw(address netip.Addr) { r.announcer.Withdraw(address) }

// Networks returns the prefixes that are announced for more than one address.
func (r *Routes) Networks() []netip.Prefix { return r.announcer.Networks() }

// Complete reports that all addresses of this node are announced: a router with graceful restart drops the other routes of an
// earlier process.
func (r *Routes) Complete() { r.announcer.Complete() }

// Begin starts the sessions. Announce before it what can be: a router then has it with the first message.
func (r *Routes) Begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.begun = true
	r.reconcile()
}

// SetNode records this node's object. Its labels select peers, and its first internal
// IPv4 address is the router ID. No session begins before.
func (r *Routes) SetNode(n *corev1.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n == nil || r.node != nil && labels.Equals(r.node.Labels, n.Labels) && slices.Equal(r.node.Status.Addresses, n.Status.Addresses) {
		return
	}
	r.node = n
	for _, a := range n.Status.Addresses {
		if id, err := netip.ParseAddr(a.Address); err == nil && id.Is4() && a.Type == corev1.NodeInternalIP {
			r.announcer.SetRouterID(id)
			break
		}
	}
	r.reconcile()
}

// Close withdraws all addresses, and returns when the routers know that or ctx ends.
func (r *Routes) Close(ctx context.Context) { r.announcer.Close(ctx) }

// Restart is Close for a process that another one follows at once: routers with graceful restart keep the routes.
func (r *Routes) Restart(ctx context.Context) { r.announcer.Restart(ctx) }

// reconcile gives the peers of this node to the announcer. The caller holds mu.
func (r *Routes) reconcile() {
	if !r.begun || !r.listed || r.node == nil {
		return
	}
	peers := slices.Clone(r.o.Peers)
	names := make([]string, 0, len(r.objects))
	referenced := map[string]bool{}
	for name, o := range r.objects {
		names = append(names, name)
		if ref := o.Spec.PasswordSecretRef; ref != nil {
			referenced[ref.Name] = true
		}
	}
	slices.Sort(names)
	invalid := map[string]v1.PeerStatus{}
	for _, name := range names {
		o := r.objects[name]
		peer, use, err := r.peerOf(o)
		if err == nil && use {
			err = distinct(peer, peers)
		}
		switch {
		case err != nil:
			invalid[name] = r.rejected(o, err)
		case use:
			peers = append(peers, peer)
		}
	}
	changed := len(invalid) != len(r.invalid)
	for name, s := range invalid {
		changed = changed || r.invalid[name].Reason != s.Reason
	}
	r.invalid = invalid
	for name, f := range r.secrets {
		if !referenced[name] {
			f.cancel()
			delete(r.secrets, name)
		}
	}
	r.announcer.SetPeers(peers)
	if changed {
		r.changed()
	}
}

// distinct returns an error if p is one of peers under another name, or has the name
// of another.
func distinct(p bgp.Peer, peers []bgp.Peer) error {
	for _, other := range peers {
		if other.Name == p.Name || other.Address == p.Address && other.Port == p.Port {
			return fmt.Errorf("%s is already the address of peer %s", p.Address, other.Name)
		}
	}
	return nil
}

// peerOf returns the peer of an object, and whether this node has a session with it. The
// caller holds mu.
func (r *Routes) peerOf(o *v1.BGPPeer) (p bgp.Peer, use bool, err error) {
	s := o.Spec
	if s.NodeSelector != nil {
		selector, err := metav1.LabelSelectorAsSelector(s.NodeSelector)
		if err != nil {
			return p, false, fmt.Errorf("nodeSelector: %w", err)
		}
		if !selector.Matches(labels.Set(r.node.Labels)) {
			return p, false, nil
		}
	}
	p = bgp.Peer{
		Name: o.Name, Port: uint16(s.Port), LocalASN: uint32(s.LocalASN), PeerASN: uint32(s.PeerASN),
		HoldTime: durationOf(s.HoldTime), KeepaliveTime: durationOf(s.KeepaliveTime),
		GracefulRestart: s.GracefulRestart, RestartTime: durationOf(s.RestartTime), MultihopTTL: int(s.EBGPMultihop),
	}
	if s.BFD != nil {
		p.BFD = bfd.Default()
		p.BFD.Transmit = cmp.Or(durationOf(s.BFD.TransmitInterval), p.BFD.Transmit)
		p.BFD.Receive = cmp.Or(durationOf(s.BFD.ReceiveInterval), p.BFD.Receive)
		p.BFD.Multiplier = cmp.Or(int(s.BFD.DetectMultiplier), p.BFD.Multiplier)
	}
	if p.Port == 0 {
		p.Port = bgp.Port
	}
	if p.Address, err = netip.ParseAddr(s.Address); err != nil {
		return p, false, err
	}
	if s.SourceAddress != "" {
		if p.SourceAddress, err = netip.ParseAddr(s.SourceAddress); err != nil {
			return p, false, err
		}
	}
	if s.PasswordSecretRef != nil {
		secret := r.follow(s.PasswordSecretRef.Name)
		switch {
		case !secret.listed:
			return p, false, nil
		case secret.password == nil:
			return p, false, fmt.Errorf("there is no Secret %s/%s with a key %q", svc.SystemNamespace, s.PasswordSecretRef.Name, v1.PasswordKey)
		}
		p.Password = *secret.password
	}
	return p, true, p.Validate()
}

func durationOf(d *metav1.Duration) time.Duration {
	if d == nil {
		return 0
	}
	return d.Duration
}

// follow follows a Secret of svc.SystemNamespace. The caller holds mu.
func (r *Routes) follow(name string) *followed {
	if f := r.secrets[name]; f != nil {
		return f
	}
	ctx, cancel := context.WithCancel(r.ctx)
	f := &followed{cancel: cancel}
	r.secrets[name] = f
	set := func(s *corev1.Secret) {
		r.mu.Lock()
		defer r.mu.Unlock()
		f.listed, f.password = true, nil
		if s != nil && len(s.Data[v1.PasswordKey]) > 0 {
			f.password = new(strings.TrimRight(string(s.Data[v1.PasswordKey]), "\r\n"))
		}
		if ctx.Err() == nil {
			r.reconcile()
		}
	}
	only := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()}
	r.running.Go(func() {
		reflector.Run(ctx, "lb/secret", reflector.From(r.o.Client.CoreV1().Secrets(svc.SystemNamespace), only), reflector.Sink[*corev1.Secret]{
			Replace: func(all []*corev1.Secret) {
				if len(all) == 0 {
					set(nil)
					return
				}
				set(all[0])
			},
			Set:    set,
			Delete: func(*corev1.Secret) { set(nil) },
		})
	})
	return f
}

// rejected returns the status of an object that cannot be used, and records an Event
// if the reason is new. The caller holds mu.
func (r *Routes) rejected(o *v1.BGPPeer, err error) v1.PeerStatus {
	reason := "this BGPPeer cannot be used: " + err.Error()
	if old, ok := r.invalid[o.Name]; ok && old.Reason == reason {
		return old
	}
	r.o.Log.Warn("a BGPPeer cannot be used", "peer", o.Name, "err", err)
	r.record(o, corev1.EventTypeWarning, "InvalidBGPPeer", reason)
	return v1.PeerStatus{Name: o.Name, Address: o.Spec.Address, State: "Idle", Since: metav1.NowMicro(), Reason: reason}
}

// sessionChanged records an Event about a session.
func (r *Routes) sessionChanged(s bgp.PeerStatus) {
	r.mu.Lock()
	o := r.objects[s.Name]
	r.mu.Unlock()
	if o != nil {
		switch {
		case s.Established() && s.Reason == "":
			r.record(o, corev1.EventTypeNormal, "BGPSessionEstablished", "node "+r.o.Node+" has a session with "+o.Spec.Address)
		case s.Established():
			r.record(o, corev1.EventTypeWarning, "BGPRoutesMissing", "node "+r.o.Node+": "+s.Reason)
		case s.Reason != "":
			r.record(o, corev1.EventTypeWarning, "BGPSessionFailed", "node "+r.o.Node+": "+s.Reason)
		}
	}
	r.changed()
}

func (r *Routes) changed() {
	if r.o.Changed != nil {
		r.o.Changed()
	}
}

func (r *Routes) record(o *v1.BGPPeer, eventType, reason, message string) {
	if r.o.Events == nil {
		return
	}
	r.o.Events.Event(&corev1.ObjectReference{
		APIVersion: v1.GroupVersion.String(), Kind: "BGPPeer", Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion,
	}, eventType, reason, message)
}

// Status returns the sessions of this node.
func (r *Routes) Status() []v1.PeerStatus {
	var out []v1.PeerStatus
	for _, p := range r.announcer.Peers() {
		out = append(out, v1.PeerStatus{Name: p.Name, Address: p.Address.String(), State: p.State, Since: metav1.NewMicroTime(p.Since),
			Reason: p.Reason, BFD: p.BFD, Prefixes: int32(p.Prefixes)})
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.invalid {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b v1.PeerStatus) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// attributesOf returns the attributes of a route to an address. With an error it returns
// the valid attributes.
func attributesOf(b *v1.PoolRoute, address netip.Addr) (bgp.Attributes, error) {
	out := bgp.Attributes{Peers: b.Peers, ASPathPrepend: int(b.ASPathPrepend)}
	if b.LocalPreference != nil {
		out.LocalPreference = new(uint32(*b.LocalPreference))
	}
	length := b.AggregationLengthV4
	if address.Is6() {
		length = b.AggregationLengthV6
	}
	if length != nil {
		out.AggregationLength = int(*length)
	}
	var failed error
	for _, text := range b.Communities {
		c, err := bgp.ParseCommunity(text)
		if err != nil {
			failed = err
			continue
		}
		out.Communities = append(out.Communities, c)
	}
	if len(out.Communities) > bgp.MaxCommunities {
		failed = fmt.Errorf("%d communities, of which the first %d are used", len(out.Communities), bgp.MaxCommunities)
	}
	return out, failed
}
