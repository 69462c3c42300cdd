package allocator

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Plan is what a write of a Service requests, and what it releases when it
// succeeds. It refers to the Service it was made for.
type Plan struct {
	requests []request
	releases []claim
}

// request is one address or port that a write needs.
type request struct {
	// claim has an empty name if any will do.
	claim
	// assign puts the allocated name into the Service.
	assign func(name string)
	// apiError is the answer to the writer for an error of the pool.
	apiError func(error) error
}

// PlanCreate returns what a new Service needs. Its families are settled.
func PlanCreate(s *corev1.Service) Plan {
	var p Plan
	p.requestClusterIPs(s)
	if NeedsNodePort(s) {
		p.requestNodePorts(s)
	}
	if NeedsHealthCheckPort(s) {
		p.requestHealthCheckPort(s)
	}
	return p
}

// PlanUpdate returns what cur needs beyond what prev has, and what it releases.
func PlanUpdate(cur, prev *corev1.Service) Plan {
	var p Plan
	p.updateClusterIPs(cur, prev)
	p.updateNodePorts(cur, prev)
	switch had, has := NeedsHealthCheckPort(prev), NeedsHealthCheckPort(cur); {
	case !had && has:
		p.requestHealthCheckPort(cur)
	case had && !has && prev.Spec.HealthCheckNodePort != 0:
		p.releases = append(p.releases, portClaim(prev.Spec.HealthCheckNodePort))
	}
	return p
}

// requestClusterIPs plans an address for each family.
func (p *Plan) requestClusterIPs(s *corev1.Service) {
	if !NeedsClusterIP(s) || IsHeadless(s) {
		return
	}
	for i := range s.Spec.IPFamilies {
		p.requestClusterIP(s, i)
	}
}

// requestClusterIP plans the address of the i-th family.
func (p *Plan) requestClusterIP(s *corev1.Service, i int) {
	spec := &s.Spec
	for len(spec.ClusterIPs) <= i {
		spec.ClusterIPs = append(spec.ClusterIPs, "")
	}
	requested := spec.ClusterIPs[i]
	given := append([]string(nil), spec.ClusterIPs...)
	p.requests = append(p.requests, request{
		claim: claim{ipResource(spec.IPFamilies[i]), requested},
		assign: func(ip string) {
			if requested != "" {
				ip = requested // as it was spelled
			}
			spec.ClusterIPs[i] = ip
			if i == 0 {
				spec.ClusterIP = ip
			}
		},
		apiError: func(err error) error {
			if requested == "" {
				return apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: %w", err))
			}
			return invalid(s, field.Invalid(field.NewPath("spec", "clusterIPs"), given,
				fmt.Sprintf("failed to allocate IP %v: %v", requested, err)))
		},
	})
}

func invalid(s *corev1.Service, err *field.Error) error {
	return apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, s.Name, field.ErrorList{err})
}

// requestNodePorts plans the node ports of a new Service. Ports of one number
// and different protocols share a node port.
func (p *Plan) requestNodePorts(s *corev1.Service) {
	auto := AllocatesNodePorts(s)
	shared := map[int32]int32{} // node ports by port number; 0 means any
	for i, sp := range s.Spec.Ports {
		if sp.NodePort == 0 && !auto {
			continue
		}
		n, planned := shared[sp.Port]
		switch {
		case !planned:
			n = firstNodePort(s.Spec.Ports, sp.Port)
			shared[sp.Port] = n
			p.requestNodePort(s, i, n, func(n int32) {
				for j := range s.Spec.Ports {
					if other := &s.Spec.Ports[j]; auto && other.Port == sp.Port && other.NodePort == 0 {
						other.NodePort = n
					}
				}
			})
		case sp.NodePort != 0 && sp.NodePort != n:
			p.requestNodePort(s, i, sp.NodePort, func(int32) {})
		}
	}
}

// firstNodePort returns the first node port that is set for a port of that
// number, or 0.
func firstNodePort(ports []corev1.ServicePort, number int32) int32 {
	for _, p := range ports {
		if p.Port == number && p.NodePort != 0 {
			return p.NodePort
		}
	}
	return 0
}

// requestNodePort plans the node port of the i-th port: the one requested, or
// any if that is 0.
func (p *Plan) requestNodePort(s *corev1.Service, i int, requested int32, assign func(int32)) {
	p.requestPort(requested, assign, func(err error) error {
		if requested == 0 {
			return apierrors.NewInternalError(fmt.Errorf("failed to allocate a nodePort: %w", err))
		}
		return invalid(s, field.Invalid(field.NewPath("spec", "ports").Index(i).Child("nodePort"), requested, err.Error()))
	})
}

func (p *Plan) requestHealthCheckPort(s *corev1.Service) {
	requested := s.Spec.HealthCheckNodePort
	p.requestPort(requested, func(n int32) { s.Spec.HealthCheckNodePort = n }, func(err error) error {
		what := "a"
		if requested != 0 {
			what = "requested"
		}
		return apierrors.NewInternalError(fmt.Errorf("failed to allocate %s HealthCheck NodePort %v: %w", what, requested, err))
	})
}

func (p *Plan) requestPort(requested int32, assign func(int32), apiError func(error) error) {
	r := request{claim: claim{resource: nodePort}, apiError: apiError, assign: func(name string) {
		n, _ := parsePort(name)
		assign(int32(n))
	}}
	if requested != 0 {
		r.name = fmt.Sprint(requested)
	}
	p.requests = append(p.requests, r)
}

// updateClusterIPs plans the changes of addresses: all of them on the way from
// and to ExternalName, the second one when a stack is added or removed.
func (p *Plan) updateClusterIPs(cur, prev *corev1.Service) {
	had, has := len(prev.Spec.IPFamilies), len(cur.Spec.IPFamilies)
	switch {
	case !NeedsClusterIP(prev):
		p.requestClusterIPs(cur)
	case IsHeadless(prev):
	case !NeedsClusterIP(cur):
		p.releases = append(p.releases, ipClaims(prev.Spec.ClusterIPs)...)
	case had == 1 && has == 2:
		p.requestClusterIP(cur, 1)
	case had == 2 && has == 1 && len(prev.Spec.ClusterIPs) == 2:
		p.releases = append(p.releases, ipClaims(prev.Spec.ClusterIPs[1:])...)
	}
}

// updateNodePorts plans node ports that prev does not have, and the release of
// values that cur no longer has.
func (p *Plan) updateNodePorts(cur, prev *corev1.Service) {
	old, kept := map[int32]bool{}, map[int32]bool{}
	if NeedsNodePort(prev) {
		old = NodePorts(prev)
	}
	if NeedsNodePort(cur) {
		kept = NodePorts(cur)
		planned := map[int32]bool{}
		for i := range cur.Spec.Ports {
			sp := &cur.Spec.Ports[i]
			switch {
			case sp.NodePort == 0 && AllocatesNodePorts(cur):
				p.requestNodePort(cur, i, 0, func(n int32) { sp.NodePort = n })
			case sp.NodePort != 0 && !old[sp.NodePort] && !planned[sp.NodePort]:
				planned[sp.NodePort] = true
				p.requestNodePort(cur, i, sp.NodePort, func(int32) {})
			}
		}
	}
	for n := range old {
		if !kept[n] {
			p.releases = append(p.releases, portClaim(n))
		}
	}
}
