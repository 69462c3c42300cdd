// Package metallb decides what a change from MetalLB to fairlead lb means for a cluster: how MetalLB's objects read here, what is
// refused, and which Services keep their addresses. Look reads the cluster; Decide is pure.
package metallb

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/lb/metallb"
	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Cluster is what runs on a cluster, as far as load balancers are concerned.
type Cluster struct {
	// Speaker and Controller are MetalLB's, nil if they do not run.
	Speaker    *appsv1.DaemonSet
	Controller *appsv1.Deployment
	// Objects are those of metallb.io in the namespace of the speaker, as JSON; empty if there are none.
	Objects []byte
	// Fairlead is the DaemonSet of fairlead lb, nil if there is none.
	Fairlead *appsv1.DaemonSet
	Services []*corev1.Service
}

// Name is the name of fairlead's DaemonSet, in the manifest and in the chart.
const Name = "fairlead-lb"

// Plan is what 'fairlead migrate plan' shows of load balancers. Its JSON form is meant for programs: fields are only ever added.
type Plan struct {
	// MetalLB describes what runs, empty if MetalLB does not.
	MetalLB string `json:"metalLB,omitempty"`
	// Announce is the --lb-announce of the nodes.
	Announce string `json:"announce,omitempty"`
	// Differs has what behaves differently, Refused what must be changed first.
	Differs []string `json:"differs,omitempty"`
	Refused []string `json:"refused,omitempty"`
	// Addresses are the addresses of Services that fairlead lb takes over.
	Addresses int `json:"addresses,omitempty"`
}

// maxNamed bounds the Services that a line names.
const maxNamed = 5

// Decide makes the plan.
func Decide(c *Cluster) *Plan {
	p := &Plan{}
	if c.Speaker == nil && len(c.Objects) == 0 {
		return p
	}
	p.describe(c)
	r, err := metallb.Convert(bytes.NewReader(c.Objects))
	var refusals metallb.Refusals
	switch {
	case errors.As(err, &refusals):
		p.Refused = append(p.Refused, refusals...)
		return p
	case err != nil:
		p.Refused = append(p.Refused, err.Error())
		return p
	}
	p.Announce = r.Announce
	p.Differs = append(p.Differs, r.Notes...)
	if r.Announce == v1.AnnounceBGP || len(r.Peers) > 0 {
		p.differ("routers lose the routes of a node from the end of MetalLB's BGP session until fairlead's begins, since both have the " +
			"address of the node: while all nodes change at the same time, load balancers cannot be reached")
	}
	if r.Announce == v1.AnnounceARP {
		p.differ("between the end of MetalLB's speakers and fairlead's first announcement, clients reach a load balancer only if they " +
			"know its MAC address already")
	}
	p.decideServices(c, r.Pools)
	return p
}

// describe describes what runs.
func (p *Plan) describe(c *Cluster) {
	var parts []string
	if c.Speaker != nil {
		parts = append(parts, fmt.Sprintf("DaemonSet %s/%s, %s", c.Speaker.Namespace, c.Speaker.Name, image(&c.Speaker.Spec.Template.Spec)))
	}
	if c.Controller != nil {
		parts = append(parts, fmt.Sprintf("Deployment %s/%s", c.Controller.Namespace, c.Controller.Name))
	}
	if len(parts) == 0 {
		parts = append(parts, "objects of metallb.io; no speaker runs")
	}
	p.MetalLB = strings.Join(parts, "; ")
	if c.Fairlead != nil && c.Speaker != nil && c.Speaker.Status.DesiredNumberScheduled > 0 {
		p.differ("the DaemonSet %s is installed while MetalLB's speakers run: do not apply an IPAddressPool before they have ended", Name)
	}
}

func image(spec *corev1.PodSpec) string {
	if len(spec.Containers) == 0 {
		return "without a container"
	}
	return spec.Containers[0].Image
}

// decideServices counts the addresses that are taken over, and lists Services whose addresses would be announced no more.
func (p *Plan) decideServices(c *Cluster, pools []*v1.IPAddressPool) {
	var outside, classes []string
	for _, s := range c.Services {
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			continue
		}
		for _, i := range s.Status.LoadBalancer.Ingress {
			a, err := netip.ParseAddr(i.IP)
			name := s.Namespace + "/" + s.Name + " (" + i.IP + ")"
			switch class := s.Spec.LoadBalancerClass; {
			case err != nil:
			case class != nil && *class != svc.LoadBalancerClass:
				classes = append(classes, name)
			case slices.ContainsFunc(pools, func(pool *v1.IPAddressPool) bool { return holds(pool, a) }):
				p.Addresses++
			default:
				outside = append(outside, name)
			}
		}
	}
	if len(outside) > 0 {
		p.differ("Services with an address that is in no pool keep it in their status, but fairlead lb does not announce it: %s", some(outside))
	}
	if len(classes) > 0 {
		p.differ("Services with another loadBalancerClass than %s are not fairlead's, and the class of a Service cannot be changed: %s",
			svc.LoadBalancerClass, some(classes))
	}
}

// some joins the first names.
func some(names []string) string {
	slices.Sort(names)
	if n := len(names) - maxNamed; n > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:maxNamed], ", "), n)
	}
	return strings.Join(names, ", ")
}

// holds reports whether an address is in a range of a pool.
func holds(p *v1.IPAddressPool, a netip.Addr) bool {
	return slices.ContainsFunc(p.Spec.Addresses, func(text string) bool {
		r, err := pool.Parse(text)
		return err == nil && r.Contains(a)
	})
}

func (p *Plan) differ(format string, args ...any) {
	p.Differs = append(p.Differs, fmt.Sprintf(format, args...))
}
