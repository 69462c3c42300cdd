// Package metallb decides what a change from MetalLB to fairlead lb means for a cluster: how MetalLB's objects read here, what is
// refused, and which Services keep their addresses. Look reads the cluster; Decide is pure.
package metallb

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/lb/kubevip"
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
	// Sessions are the nodes of the speakers, and where Services have endpoints.
	Sessions *Sessions
	// Secrets are the Secrets of MetalLB's namespace that its BGPPeers name, by name.
	Secrets map[string]*corev1.Secret
	// KubeVIP are the DaemonSets of kube-vip, which only the plan shows.
	KubeVIP []*appsv1.DaemonSet
}

// Name is the name of fairlead's DaemonSet, in the manifest and in the chart.
const Name = "fairlead-lb"

// Plan is what 'fairlead migrate plan' shows of load balancers. Its JSON form is meant for programs: fields are only ever added.
type Plan struct {
	// MetalLB describes what runs, empty if MetalLB does not.
	MetalLB string `json:"metalLB,omitempty"`
	// Phase is how far the migration is, and Failure why its last step failed.
	Phase   Phase  `json:"phase,omitempty"`
	Failure string `json:"failure,omitempty"`
	// Announce is the --lb-announce of the nodes.
	Announce string `json:"announce,omitempty"`
	// Differs has what behaves differently, Refused what must be changed first.
	Differs []string `json:"differs,omitempty"`
	Refused []string `json:"refused,omitempty"`
	// Addresses is how many addresses of Services fairlead lb takes over.
	Addresses int `json:"addresses,omitempty"`
	// KubeVIP has the settings of kube-vip's DaemonSets; no command changes them.
	KubeVIP []KubeVIP `json:"kubeVIP,omitempty"`

	speaker    *appsv1.DaemonSet
	controller *appsv1.Deployment
	replicas   int32
	pools      []*v1.IPAddressPool
	peers      []*v1.BGPPeer
	passwords  map[string]string // by Secret
	given      []Address
	broken     error
	begun      string // what shows that nodes change their sessions of BGP, empty if nothing does
	unread     error
}

// KubeVIP is a DaemonSet of kube-vip, and the counterpart of each of its settings.
type KubeVIP struct {
	DaemonSet string   `json:"daemonSet"`
	Image     string   `json:"image"`
	Settings  []string `json:"settings,omitempty"`
}

// Broken is an error if the phase cannot be read or MetalLB is not found. No command goes on then.
func (p *Plan) Broken() error { return p.broken }

// Unread is an error if nodes change their sessions of BGP, and with which routers cannot be read. No command changes anything then.
func (p *Plan) Unread() error { return p.unread }

// maxNamed bounds the Services that a line names.
const maxNamed = 5

// Decide makes the plan.
func Decide(c *Cluster) *Plan {
	p := &Plan{}
	for _, d := range c.KubeVIP {
		if container := kubevip.ContainerOf(&d.Spec.Template.Spec); container != nil {
			p.KubeVIP = append(p.KubeVIP, KubeVIP{d.Namespace + "/" + d.Name, container.Image, kubevip.Settings(container)})
		}
	}
	if c.Speaker == nil && len(c.Objects) == 0 {
		p.broken = errors.New("MetalLB does not run: there is nothing to change")
		return p
	}
	p.describe(c)
	if p.broken = p.find(c); p.broken != nil {
		p.Refused = append(p.Refused, p.broken.Error())
	} else {
		p.decideStart(c)
	}
	p.begun = begun(c)
	r, err := metallb.Convert(bytes.NewReader(c.Objects))
	if err == nil && len(r.Peers) == 0 {
		p.readNone(c, errors.New("there is no BGPPeer"))
	}
	var refusals metallb.Refusals
	switch {
	case errors.As(err, &refusals):
		p.readNone(c, refusals)
		p.Refused = append(p.Refused, refusals...)
		return p
	case err != nil:
		p.readNone(c, err)
		p.Refused = append(p.Refused, err.Error())
		return p
	}
	p.Announce, p.pools, p.peers, p.passwords = r.Announce, r.Pools, r.Peers, r.Passwords
	p.takePasswords(c)
	for _, note := range r.Notes {
		if !strings.Contains(note, ": spec.password") { // 'apply' does what these say
			p.Differs = append(p.Differs, note)
		}
	}
	if r.Announce != v1.AnnounceBGP {
		p.differ("fairlead chooses the node of each address by itself: open connections end if it is another one than MetalLB's, as " +
			"when MetalLB's node fails")
	} else if len(r.Peers) == 0 {
		p.refuse("pools are announced by BGP, and there is no BGPPeer: add one, or remove the BGPAdvertisements")
	}
	p.decideServices(c, r.Pools)
	if p.BGP() {
		p.decideBGP(c)
	}
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
}

// find finds MetalLB's programs, and the phase.
func (p *Plan) find(c *Cluster) (err error) {
	if p.speaker, p.controller = c.Speaker, c.Controller; c.Speaker == nil {
		return errors.New("there is no DaemonSet of MetalLB's speaker: there is nothing to change")
	}
	if p.Phase, err = ParsePhase(c.Speaker.Annotations[Annotation]); err != nil {
		return fmt.Errorf("on the DaemonSet %s/%s: %w", c.Speaker.Namespace, c.Speaker.Name, err)
	}
	p.Failure = c.Speaker.Annotations[Failure]
	if _, err := strategy(c.Speaker); err != nil {
		return err
	}
	if c.Controller == nil {
		return fmt.Errorf("there is no Deployment of MetalLB's controller in the namespace %s", c.Speaker.Namespace)
	}
	if c.Fairlead != nil && p.Phase == Before {
		return fmt.Errorf("the DaemonSet %s was not installed by 'fairlead migrate'; docs/loadbalancer.md has the steps by hand, "+
			"and the way back. Do not apply an IPAddressPool before MetalLB's speakers have ended", Name)
	}
	if p.replicas = 1; c.Controller.Spec.Replicas != nil {
		p.replicas = *c.Controller.Spec.Replicas
	}
	if text, ok := c.Speaker.Annotations[Replicas]; ok {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil || n < 1 {
			return fmt.Errorf("on the DaemonSet %s, the annotation %s is %q; want a number from 1 on", c.Speaker.Name, Replicas, text)
		}
		p.replicas = int32(n)
	}
	return nil
}

// decideStart refuses a MetalLB that serves other Services than fairlead lb would, or that does not run well.
func (p *Plan) decideStart(c *Cluster) {
	for _, container := range slices.Concat(c.Speaker.Spec.Template.Spec.Containers, c.Controller.Spec.Template.Spec.Containers) {
		if slices.ContainsFunc(slices.Concat(container.Command, container.Args), isClassFlag) {
			p.refuse("MetalLB has --lb-class, so it serves only Services of that class: fairlead lb serves the ones of class %s and "+
				"the ones without a class, and the class of a Service cannot be changed", svc.LoadBalancerClass)
			break
		}
	}
	if p.Phase != Before {
		return
	}
	if s := &c.Speaker.Status; s.NumberReady < s.DesiredNumberScheduled || s.NumberReady == 0 {
		p.refuse("%d of %d of MetalLB's speakers are ready: repair the others first", s.NumberReady, s.DesiredNumberScheduled)
	}
	if p.replicas == 0 {
		p.refuse("the Deployment %s/%s has no Pods: scale it up first", c.Controller.Namespace, c.Controller.Name)
	}
}

// isClassFlag reports whether an argument restricts MetalLB to a class of Services.
func isClassFlag(arg string) bool {
	name, value, has := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	return strings.HasPrefix(arg, "-") && name == "lb-class" && (!has || value != "")
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
	poolOf := func(a netip.Addr) *v1.IPAddressPoolSpec {
		if i := slices.IndexFunc(pools, func(pool *v1.IPAddressPool) bool { return holds(pool, a) }); i >= 0 {
			return &pools[i].Spec
		}
		return nil
	}
	for _, s := range c.Services {
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			continue
		}
		for _, i := range s.Status.LoadBalancer.Ingress {
			a, err := netip.ParseAddr(i.IP)
			name, pool := s.Namespace+"/"+s.Name+" ("+i.IP+")", poolOf(a)
			switch class := s.Spec.LoadBalancerClass; {
			case err != nil:
			case class != nil && *class != svc.LoadBalancerClass:
				classes = append(classes, name)
			case pool != nil:
				p.Addresses++
				p.given = append(p.given, Address{Service: svc.NameOf(s), Addr: a, pool: pool})
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

func (p *Plan) refuse(format string, args ...any) {
	p.Refused = append(p.Refused, fmt.Sprintf(format, args...))
}

func (p *Plan) differ(format string, args ...any) {
	p.Differs = append(p.Differs, fmt.Sprintf(format, args...))
}
