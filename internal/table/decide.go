package table

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// defaultAffinity is how long a client sticks where the Service does not say
// (behaviour 62).
const defaultAffinity = 10800 * time.Second

// decide turns a Service and its slices into service ports. It is the one place
// where it is decided where a packet may go:
//
//	cluster = ready endpoints that hints name for this node or zone;
//	          without a ready one anywhere: serving and terminating ones
//	local   = ready endpoints on this node;
//	          without one: serving and terminating ones on this node
//
//	frontend    policy            Endpoints  LocalClients  Masquerade  if there are none
//	ClusterIP   internal Cluster  cluster    same          by range    reject
//	ClusterIP   internal Local    local      same          by range    drop if cluster has some, else reject
//	the others  external Cluster  cluster    same          yes         reject
//	the others  external Local    local      cluster       no          drop if cluster has some, else reject
//	with direct return (not node ports)
//	            any               local      cluster       no          drop; the nodes of cluster are Hops
//
// "The others" are external IPs, load balancer IPs and node ports. "By range"
// is left to the plane, which knows the packet's source: Table.ClusterCIDRs and
// Table.MasqueradeAll. Flows of UDP and SCTP that are there may keep every endpoint
// that serves (ServicePort.Serving). Of its own Pods a node knows better than any slice
// whether they are ready (SetOwnPods). Endpoints on nodes that this one does not reach (SetUnreached) count
// in cluster, and flows of UDP keep them, only if there is no other. Only load balancer IPs have source ranges. An address,
// port and protocol that two Services want belongs to one of them; the loser
// has no such frontend, and a Problem.
func (b *Builder) decide(s *service) ([]*ServicePort, []Problem) {
	if s.host != nil {
		return b.decideHost(s)
	}
	c := &complaints{service: s.name}
	s.hinted = false
	direct := b.wants(b.cfg.Forwarding, s, c)
	if !proxied(s.obj) {
		return nil, nil
	}
	all := wants(s.obj, c)
	ranges, limited := sourceRanges(s.obj, c)
	s.ranged = limited
	var ports []*ServicePort
	for start := 0; start < len(all); {
		end := start + 1
		for end < len(all) && all[end].key == all[start].key {
			end++
		}
		mine := b.granted(s, all[start:end], c)
		p := b.decidePort(s, all[start:end], mine, direct, c)
		for i := range p.Frontends {
			if f := &p.Frontends[i]; f.Kind == LoadBalancerIP {
				f.SourceRanges = rangesFor(ranges, limited, f.Addr.Addr(), b.node.primary)
			}
		}
		ports = append(ports, p)
		start = end
	}
	return ports, c.done()
}

// granted returns the frontends of all that s gets.
func (b *Builder) granted(s *service, all []want, c *complaints) []want {
	mine := make([]want, 0, len(all))
	for _, w := range all {
		who, taken := reserver(0), false
		switch {
		case s.host != nil:
			who, taken = b.node.reservedOfHost(w.at)
		case (w.kind == ExternalIP || w.kind == LoadBalancerIP) && s.name != apiService:
			who, taken = b.node.reserved.by(w.at)
		}
		if taken {
			c.add(ReasonAddressReserved, "%s %s is %s", w.kind, w.at, who)
			continue
		}
		owner, taken := b.claims.Owner(w.at)
		taken = taken && owner.s != s
		if s.host != nil && !taken {
			owner, taken = b.claims.Owner(onEveryAddress(w.at))
			taken = taken && owner.s != s && !owner.one
		}
		if taken {
			c.add(ReasonAddressTaken, "%s %s is served by %s", w.kind, w.at, Describe(owner.s.name))
			continue
		}
		mine = append(mine, w)
	}
	return mine
}

// decidePort decides one port of one family. asked is not empty; mine is the
// part of it that is granted.
func (b *Builder) decidePort(s *service, asked, mine []want, direct bool, c *complaints) *ServicePort {
	k, proto := asked[0].key, asked[0].at.Protocol
	p := &ServicePort{ID: k.ID, Family: k.Family, Protocol: proto, Affinity: affinity(s.obj)}
	if b.cfg.Scheduler != nil {
		var err error
		if p.Scheduler, err = b.cfg.Scheduler(s.obj.Annotations); err != nil {
			c.add(ReasonUnknownScheduler, "%v", err)
		}
	}
	all := b.candidates(s, k, proto, c)
	forCluster := ForCluster(all, b.cfg.NodeName, b.node.zone)
	cluster, local := c.fit(k, pick(all, forCluster)), c.fit(k, pick(all, ForLocal(all)))
	if slices.Equal(cluster, local) {
		local = cluster
	}
	if b.cfg.Unweighted != nil && uneven(cluster) {
		if why := b.cfg.Unweighted(p.Scheduler); why != "" {
			c.add(ReasonWeightsIgnored, "the weights of endpoints (annotation %s of Pods) have no effect: %s", svc.WeightAnnotation, why)
		}
	}
	if proto != svc.TCP {
		counts := func(*Candidate) bool { return true }
		if proto == svc.UDP { // SCTP looks for another path itself (RFC 9260, section 8.2)
			counts = reached(all)
		}
		p.Serving = pick(all, func(c *Candidate) bool { return c.Is(Serving) && counts(c) })
		if slices.Equal(p.Serving, cluster) {
			p.Serving = cluster
		}
	}
	if needsHealthCheck(s.obj) {
		p.HealthCheckNodePort = uint16(s.obj.Spec.HealthCheckNodePort)
		p.LocalReady = b.localReady(s, k.Family)
	}
	var hops []Hop
	if direct {
		hops = b.hops(all, forCluster, k, proto, b.cfg.NodeName, len(s.obj.Spec.Ports), c)
	}
	for _, w := range mine {
		f := Frontend{Kind: w.kind, Addr: w.at.Addr}
		switch {
		case w.kind == ClusterIP && internalLocal(s.obj):
			f.Endpoints, f.Drop = local, len(local) == 0 && len(cluster) > 0
		case w.kind == ClusterIP:
			f.Endpoints = cluster
		case externalLocal(s.obj), hops != nil && w.kind != NodePort:
			f.Endpoints, f.Drop = local, len(local) == 0 && len(cluster) > 0
			if !slices.Equal(cluster, local) {
				f.LocalClients = cluster
			}
			if w.kind != NodePort {
				f.Hops = hops
			}
		default:
			f.Endpoints, f.Masquerade = cluster, true
		}
		p.Frontends = append(p.Frontends, f)
	}
	return p
}

// uneven reports whether endpoints differ in their weights.
func uneven(list []Endpoint) bool {
	return slices.ContainsFunc(list, func(e Endpoint) bool { return e.Weight != list[0].Weight })
}

func affinity(s *corev1.Service) time.Duration {
	if s.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	if c := s.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil && *c.ClientIP.TimeoutSeconds > 0 {
		return time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
	}
	return defaultAffinity
}

func internalLocal(s *corev1.Service) bool {
	return deref(s.Spec.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster) == corev1.ServiceInternalTrafficPolicyLocal
}

func externalLocal(s *corev1.Service) bool {
	external := s.Spec.Type == corev1.ServiceTypeLoadBalancer || s.Spec.Type == corev1.ServiceTypeNodePort || len(s.Spec.ExternalIPs) > 0
	return external && s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// needsHealthCheck reports whether load balancers ask this node's health check
// port for the Service (behaviour 103).
func needsHealthCheck(s *corev1.Service) bool {
	n := s.Spec.HealthCheckNodePort
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer && externalLocal(s) && n > 0 && n <= 65535
}
