package metallb

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/svc"
)

// PoolLabel is the label of the pools and the BGPPeers that a migration makes.
const PoolLabel = "fairlead.dev/migrate-lb"

// offLabel is the node label that MetalLB's speakers are given as their selector, and that no node has.
const offLabel = "fairlead.dev/metallb"

// Speaker is the DaemonSet of MetalLB's speakers.
func (p *Plan) Speaker() *appsv1.DaemonSet { return p.speaker }

// Controller is the Deployment of MetalLB's controller.
func (p *Plan) Controller() *appsv1.Deployment { return p.controller }

// ControllerReplicas is how many Pods MetalLB's controller has before and after a migration.
func (p *Plan) ControllerReplicas() int32 { return p.replicas }

// Enter returns the DaemonSet of MetalLB's speakers as it is in a phase.
func (p *Plan) Enter(d *appsv1.DaemonSet, to Phase) (*appsv1.DaemonSet, error) {
	out := d.DeepCopy()
	out.Annotations = maps.Clone(out.Annotations)
	if out.Annotations == nil {
		out.Annotations = map[string]string{}
	}
	delete(out.Annotations, Failure)
	spec := &out.Spec.Template.Spec
	spec.NodeSelector = maps.Clone(spec.NodeSelector)
	delete(spec.NodeSelector, offLabel)
	if to == After {
		if spec.NodeSelector == nil {
			spec.NodeSelector = map[string]string{}
		}
		spec.NodeSelector[offLabel] = "true"
	}
	if byNode := to == Both || to == After || to == Returning; p.BGP() && byNode {
		hold(out)
	} else if err := release(out); err != nil {
		return nil, err
	}
	if to == Before {
		delete(out.Annotations, Annotation)
		delete(out.Annotations, Replicas)
		return out, nil
	}
	out.Annotations[Annotation], out.Annotations[Replicas] = string(to), strconv.Itoa(int(p.replicas))
	return out, nil
}

// HeldLabel is the label of MetalLB's Pods that were made while nodes are changed one by one.
const HeldLabel = PoolLabel

// hold keeps MetalLB's speakers off nodes with a NodeLabel, and its present Pods from being replaced by ones of that template.
func hold(d *appsv1.DaemonSet) {
	if _, held := d.Annotations[Strategy]; !held {
		text, _ := json.Marshal(d.Spec.UpdateStrategy) // of numbers and strings
		d.Annotations[Strategy] = string(text)
	}
	d.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{Type: appsv1.OnDeleteDaemonSetStrategyType}
	t := &d.Spec.Template
	migrate.Unrequire(&t.Spec, NodeLabel)
	migrate.Require(&t.Spec, corev1.NodeSelectorRequirement{Key: NodeLabel, Operator: corev1.NodeSelectorOpDoesNotExist})
	t.Labels = maps.Clone(t.Labels)
	if t.Labels == nil {
		t.Labels = map[string]string{}
	}
	t.Labels[HeldLabel] = "true"
}

// release takes back what hold has done.
func release(d *appsv1.DaemonSet) error {
	before, err := strategy(d)
	if err != nil {
		return err
	}
	if before != nil {
		d.Spec.UpdateStrategy = *before
	}
	delete(d.Annotations, Strategy)
	releaseTemplate(d)
	return nil
}

// strategy is the update strategy that a DaemonSet had before hold, nil if it is not held.
func strategy(d *appsv1.DaemonSet) (*appsv1.DaemonSetUpdateStrategy, error) {
	text, held := d.Annotations[Strategy]
	if !held {
		return nil, nil
	}
	before := &appsv1.DaemonSetUpdateStrategy{}
	if err := json.Unmarshal([]byte(text), before); err != nil {
		return nil, fmt.Errorf("on the DaemonSet %s, the annotation %s is %q; want an update strategy as JSON: %w", d.Name, Strategy, text, err)
	}
	return before, nil
}

func releaseTemplate(d *appsv1.DaemonSet) {
	migrate.Unrequire(&d.Spec.Template.Spec, NodeLabel)
	d.Spec.Template.Labels = maps.Clone(d.Spec.Template.Labels)
	delete(d.Spec.Template.Labels, HeldLabel)
}

// Released returns the DaemonSet of MetalLB's speakers with the template that it had before. Its Pods are not replaced by that.
func (p *Plan) Released(d *appsv1.DaemonSet) *appsv1.DaemonSet {
	out := d.DeepCopy()
	releaseTemplate(out)
	return out
}

// Ours returns the DaemonSet of fairlead lb for the nodes of MetalLB's speakers. base is the manifest's; image replaces its image
// unless it is empty.
func (p *Plan) Ours(base *appsv1.DaemonSet, image string) *appsv1.DaemonSet {
	out, from := base.DeepCopy(), &p.Released(p.speaker).Spec.Template.Spec
	spec := &out.Spec.Template.Spec
	spec.NodeSelector, spec.Tolerations = maps.Clone(from.NodeSelector), slices.Clone(from.Tolerations)
	spec.Affinity = from.Affinity.DeepCopy()
	delete(spec.NodeSelector, offLabel)
	if image != "" {
		spec.Containers[0].Image = image
	}
	if p.Announce == v1.AnnounceBGP {
		spec.Containers[0].Args = append(slices.Clone(spec.Containers[0].Args), "--lb-announce="+v1.AnnounceBGP)
	}
	return out
}

// Pools returns MetalLB's pools as pools of fairlead lb.
func (p *Plan) Pools() (out []*v1.IPAddressPool) {
	for _, from := range p.pools {
		pool := from.DeepCopy()
		pool.Labels = map[string]string{PoolLabel: "true"}
		out = append(out, pool)
	}
	return out
}

// Address is an address of a Service.
type Address struct {
	Service svc.Name
	Addr    netip.Addr

	pool *v1.IPAddressPoolSpec // that it is of, converted
}

// Given are the addresses that MetalLB has given out, and that fairlead lb takes over.
func (p *Plan) Given() []Address { return slices.Clone(p.given) }

// Unannounced returns an error for an address that a Service has lost, or that no speaker of fairlead lb announces; nil if there
// is none. services are the present ones. Services that are gone have no address to announce. served reports whether a Service has
// a ready endpoint.
func Unannounced(given []Address, services []*corev1.Service, speakers []*v1.Speaker, served func(svc.Name) bool) error {
	present := map[svc.Name]*corev1.Service{}
	for _, s := range services {
		present[svc.NameOf(s)] = s
	}
	announced, complete := map[string]bool{}, true
	for _, s := range speakers {
		complete = complete && int(s.Status.AddressCount) <= len(s.Status.Addresses)
		for _, a := range s.Status.Addresses {
			announced[a.Address] = true
		}
	}
	for _, a := range given {
		s := present[a.Service]
		if s == nil || s.DeletionTimestamp != nil || s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			continue
		}
		if !slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(i corev1.LoadBalancerIngress) bool { return i.IP == a.Addr.String() }) {
			return fmt.Errorf("the Service %s no longer has the address %s", a.Service, a.Addr)
		}
		local := s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal // only nodes with an endpoint announce it
		if announced[a.Addr.String()] || !complete || local && !served(a.Service) {
			continue
		}
		return fmt.Errorf("no node announces the address %s of the Service %s%s", a.Addr, a.Service, why(speakers))
	}
	return nil
}

// why is the reason of the first speaker that may not announce.
func why(speakers []*v1.Speaker) string {
	if len(speakers) == 0 {
		return ": there is no Speaker"
	}
	for _, s := range speakers {
		if !s.Status.Eligible {
			return fmt.Sprintf("; node %s: %s", s.Name, s.Status.Reason)
		}
	}
	return ""
}
