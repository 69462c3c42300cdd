package service

import (
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// want is one address or port that a write needs.
type want struct {
	from allocator
	// asked is what the writer wants; empty means any.
	asked string
	// give puts what was allocated into the Service.
	give func(string)
	// refuse makes the answer to the writer of an error of the allocator.
	refuse func(error) error
}

// claim is one address or port that a Service has.
type claim struct {
	from allocator
	name string
}

// plan is what a write needs and what it no longer needs.
type plan struct {
	wants    []want
	releases []claim
}

// planCreate returns what a new Service needs. Its families are settled.
func (al *allocators) planCreate(svc *corev1.Service) plan {
	var p plan
	al.wantClusterIPs(&p, svc)
	if needsNodePort(svc) {
		al.wantNodePorts(&p, svc)
	}
	if needsHealthCheckPort(svc) {
		al.wantHealthCheckPort(&p, svc)
	}
	return p
}

// planUpdate returns what cur needs beyond what prev has, and what it gives up.
func (al *allocators) planUpdate(cur, prev *corev1.Service) plan {
	var p plan
	al.updateClusterIPs(&p, cur, prev)
	if needsNodePort(prev) && !needsNodePort(cur) {
		for n := range nodePorts(prev) {
			p.releases = append(p.releases, al.portClaim(n))
		}
	}
	if needsNodePort(cur) {
		al.updateNodePorts(&p, cur, prev)
	}
	switch had, has := needsHealthCheckPort(prev), needsHealthCheckPort(cur); {
	case !had && has:
		al.wantHealthCheckPort(&p, cur)
	case had && !has && prev.Spec.HealthCheckNodePort != 0:
		p.releases = append(p.releases, al.portClaim(prev.Spec.HealthCheckNodePort))
	}
	return p
}

// claimsOf returns everything that is claimed for svc.
func (al *allocators) claimsOf(svc *corev1.Service) []claim {
	var out []claim
	if needsClusterIP(svc) {
		for _, ip := range svc.Spec.ClusterIPs {
			if c, ok := al.ipClaim(ip); ok {
				out = append(out, c)
			}
		}
	}
	ports := nodePorts(svc)
	if svc.Spec.HealthCheckNodePort != 0 {
		ports[svc.Spec.HealthCheckNodePort] = true
	}
	for n := range ports {
		out = append(out, al.portClaim(n))
	}
	return out
}

func (al *allocators) portClaim(n int32) claim {
	return claim{al.ports, strconv.Itoa(int(n))}
}

func (al *allocators) ipClaim(ip string) (claim, bool) {
	a, ok := parseClusterIP(ip)
	return claim{familyAllocator{al.addrs, familyOf(ip)}, a.String()}, ok
}

// wantClusterIPs plans an address for each family.
func (al *allocators) wantClusterIPs(p *plan, svc *corev1.Service) {
	if !needsClusterIP(svc) || isHeadless(svc) {
		return
	}
	for i := range svc.Spec.IPFamilies {
		al.wantClusterIP(p, svc, i)
	}
}

// wantClusterIP plans the address of the i-th family.
func (al *allocators) wantClusterIP(p *plan, svc *corev1.Service, i int) {
	spec := &svc.Spec
	for len(spec.ClusterIPs) <= i {
		spec.ClusterIPs = append(spec.ClusterIPs, "")
	}
	asked := spec.ClusterIPs[i]
	given := append([]string(nil), spec.ClusterIPs...)
	p.wants = append(p.wants, want{
		from: familyAllocator{al.addrs, spec.IPFamilies[i]}, asked: asked,
		give: func(ip string) {
			if asked != "" {
				ip = asked // as it was spelled
			}
			spec.ClusterIPs[i] = ip
			if i == 0 {
				spec.ClusterIP = ip
			}
		},
		refuse: func(err error) error {
			if asked == "" {
				return apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: %w", err))
			}
			return invalidService(svc, field.ErrorList{field.Invalid(field.NewPath("spec", "clusterIPs"), given,
				fmt.Sprintf("failed to allocate IP %v: %v", asked, err))})
		},
	})
}

// wantNodePorts plans the node ports of a new Service. Ports of one number and
// different protocols share a node port.
func (al *allocators) wantNodePorts(p *plan, svc *corev1.Service) {
	type group struct {
		asked int32
		ports []*corev1.ServicePort
	}
	groups := map[int32]*group{}
	var order []int
	extra := map[int]bool{}
	for i := range svc.Spec.Ports {
		sp := &svc.Spec.Ports[i]
		if sp.NodePort == 0 && !autoNodePorts(svc) {
			continue
		}
		g := groups[sp.Port]
		if g == nil {
			g = &group{asked: askedNodePort(svc.Spec.Ports, sp.Port)}
			groups[sp.Port] = g
			order = append(order, i)
		} else if sp.NodePort != 0 && sp.NodePort != g.asked {
			order = append(order, i)
			extra[i] = true
			continue
		}
		g.ports = append(g.ports, sp)
	}
	for _, i := range order {
		sp := &svc.Spec.Ports[i]
		if extra[i] {
			al.wantNodePort(p, svc, i, sp.NodePort, func(int32) {})
			continue
		}
		g := groups[sp.Port]
		al.wantNodePort(p, svc, i, g.asked, func(n int32) {
			for _, sp := range g.ports {
				sp.NodePort = n
			}
		})
	}
}

// askedNodePort is the first node port that is set for a port of that number.
func askedNodePort(ports []corev1.ServicePort, number int32) int32 {
	for _, p := range ports {
		if p.Port == number && p.NodePort != 0 {
			return p.NodePort
		}
	}
	return 0
}

// wantNodePort plans the node port of the i-th port, asked or any.
func (al *allocators) wantNodePort(p *plan, svc *corev1.Service, i int, asked int32, give func(int32)) {
	w := want{from: al.ports}
	if asked != 0 {
		w.asked = strconv.Itoa(int(asked))
	}
	w.give = func(name string) {
		n, _ := parsePort(name)
		give(int32(n))
	}
	w.refuse = func(err error) error {
		if asked == 0 {
			return apierrors.NewInternalError(fmt.Errorf("failed to allocate a nodePort: %w", err))
		}
		return invalidService(svc, field.ErrorList{field.Invalid(field.NewPath("spec", "ports").Index(i).Child("nodePort"), asked, err.Error())})
	}
	p.wants = append(p.wants, w)
}

func (al *allocators) wantHealthCheckPort(p *plan, svc *corev1.Service) {
	asked := svc.Spec.HealthCheckNodePort
	w := want{from: al.ports, give: func(name string) {
		n, _ := parsePort(name)
		svc.Spec.HealthCheckNodePort = int32(n)
	}}
	if asked != 0 {
		w.asked = strconv.Itoa(int(asked))
	}
	w.refuse = func(err error) error {
		if asked != 0 {
			return apierrors.NewInternalError(fmt.Errorf("failed to allocate requested HealthCheck NodePort %v: %w", asked, err))
		}
		return apierrors.NewInternalError(fmt.Errorf("failed to allocate a HealthCheck NodePort %v: %w", asked, err))
	}
	p.wants = append(p.wants, w)
}

// updateClusterIPs plans the changes of addresses: all of them on the way from
// and to ExternalName, the second one when a stack is added or removed.
func (al *allocators) updateClusterIPs(p *plan, cur, prev *corev1.Service) {
	release := func(ips []string) {
		for _, ip := range ips {
			if c, ok := al.ipClaim(ip); ok {
				p.releases = append(p.releases, c)
			}
		}
	}
	switch {
	case unchangedPrefer(cur, prev):
	case !needsClusterIP(prev):
		al.wantClusterIPs(p, cur)
	case isHeadless(prev):
	case !needsClusterIP(cur):
		release(prev.Spec.ClusterIPs)
	case len(prev.Spec.IPFamilies) == 1 && len(cur.Spec.IPFamilies) == 2:
		al.wantClusterIP(p, cur, 1)
	case len(prev.Spec.IPFamilies) == 2 && len(cur.Spec.IPFamilies) == 1 && len(prev.Spec.ClusterIPs) == 2:
		release(prev.Spec.ClusterIPs[1:])
	}
}

// updateNodePorts plans node ports that prev does not have, and the release of
// those that cur has no more.
func (al *allocators) updateNodePorts(p *plan, cur, prev *corev1.Service) {
	old := map[int32]bool{}
	if needsNodePort(prev) {
		old = nodePorts(prev)
	}
	planned := map[int32]bool{}
	for i := range cur.Spec.Ports {
		sp := &cur.Spec.Ports[i]
		switch {
		case sp.NodePort == 0 && autoNodePorts(cur):
			al.wantNodePort(p, cur, i, 0, func(n int32) { sp.NodePort = n })
		case sp.NodePort != 0 && !old[sp.NodePort] && !planned[sp.NodePort]:
			planned[sp.NodePort] = true
			al.wantNodePort(p, cur, i, sp.NodePort, func(int32) {})
		}
	}
	kept := nodePorts(cur)
	for n := range old {
		if !kept[n] {
			p.releases = append(p.releases, al.portClaim(n))
		}
	}
}
