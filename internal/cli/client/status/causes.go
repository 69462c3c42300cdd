package status

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// maxNamed bounds how many Pods or Nodes a line names.
	maxNamed = 3
	// eventsPage is how many Warnings one request reads, maxEventPages how many requests there are at most: Events come in the
	// order of their names, so that the newest may be the last.
	eventsPage    = 2000
	maxEventPages = 50
	// recent is how old the last Warning of a Service may be to count as a problem without another sign of it.
	recent = 5 * time.Minute
)

// related has other objects than Nodes, Pods, Services and EndpointSlices. Kinds that the user may not read are empty.
type related struct {
	deployments []appsv1.Deployment
	daemonSets  []appsv1.DaemonSet
	ingresses   []networkingv1.Ingress
	classes     []networkingv1.IngressClass
	warnings    warnings
}

func readRelated(ctx context.Context, client kubernetes.Interface, namespace string) (out related) {
	all := metav1.ListOptions{}
	if l, err := client.AppsV1().Deployments(namespace).List(ctx, all); err == nil {
		out.deployments = l.Items
	}
	if l, err := client.AppsV1().DaemonSets(namespace).List(ctx, all); err == nil {
		out.daemonSets = l.Items
	}
	if l, err := client.NetworkingV1().Ingresses(namespace).List(ctx, all); err == nil {
		out.ingresses = l.Items
	}
	if l, err := client.NetworkingV1().IngressClasses().List(ctx, all); err == nil {
		out.classes = l.Items
	}
	out.warnings = readWarnings(ctx, client, namespace)
	return out
}

// readWarnings reads the newest Warnings, as far as it can.
func readWarnings(ctx context.Context, client kubernetes.Interface, namespace string) warnings {
	out := warnings{}
	page := metav1.ListOptions{FieldSelector: "type=" + corev1.EventTypeWarning, Limit: eventsPage}
	for range maxEventPages {
		l, err := listAllowed(ctx, namespace, page, func(in string) lister[corev1.EventList] { return client.CoreV1().Events(in) })
		if err != nil {
			break
		}
		out.add(l.Items)
		if page.Continue = l.Continue; page.Continue == "" {
			break
		}
	}
	return out
}

// warnings has the newest Warning about each object, by kind, namespace and name.
type warnings map[[3]string]*corev1.Event

// add adds Events, of which it keeps copies, so that the others of a page can go.
func (w warnings) add(all []corev1.Event) {
	for i := range all {
		e := &all[i]
		o := &e.InvolvedObject
		key := [3]string{o.Kind, o.Namespace, o.Name}
		if e.Type == corev1.EventTypeWarning && (w[key] == nil || lastSeen(w[key]).Before(lastSeen(e))) {
			w[key] = new(*e)
		}
	}
}

// lastSeen is when an Event was seen last.
func lastSeen(e *corev1.Event) time.Time {
	if s := e.Series; s != nil && s.LastObservedTime.After(e.LastTimestamp.Time) {
		return s.LastObservedTime.Time
	}
	return slices.MaxFunc([]time.Time{e.LastTimestamp.Time, e.EventTime.Time, e.CreationTimestamp.Time}, time.Time.Compare)
}

// of returns the newest Warning about an object of this UID that is not older than since, nil if there is none.
func (w warnings) of(kind string, o metav1.Object, since time.Time) *corev1.Event {
	e := w[[3]string{kind, o.GetNamespace(), o.GetName()}]
	uid := o.GetUID()
	// Of Nodes an Event may name the UID "" or the name.
	if e == nil || kind != "Node" && uid != "" && e.InvolvedObject.UID != uid || lastSeen(e).Before(since) {
		return nil
	}
	return e
}

// judgeEndpoints adds Services of which some endpoints are not ready, with the reasons, and nodes on which a Service with the
// policy Local has none.
func (r *Report) judgeEndpoints(services []corev1.Service, all []discoveryv1.EndpointSlice, pods *podIndex, now time.Time) {
	of := map[string][]*discoveryv1.EndpointSlice{}
	for i := range all {
		key := all[i].Namespace + "/" + all[i].Labels[discoveryv1.LabelServiceName]
		of[key] = append(of[key], &all[i])
	}
	for i := range services {
		s := &services[i]
		name := s.Namespace + "/" + s.Name
		on, unready, total := map[string]bool{}, map[string]string{}, map[string]bool{}
		for _, slice := range of[name] {
			for _, e := range slice.Endpoints {
				if ready := e.Conditions.Ready == nil || *e.Conditions.Ready; ready {
					if e.NodeName != nil {
						on[*e.NodeName] = true
					}
					total[endpointName(&e)] = true
				} else if e.Conditions.Terminating == nil || !*e.Conditions.Terminating {
					total[endpointName(&e)] = true
					if why, old := pods.whyUnready(s.Namespace, &e, now); old {
						unready[endpointName(&e)] = why
					}
				}
			}
		}
		// judgeServices names a Service with a selector that has no ready endpoint at all.
		if n := len(unready); n > 0 && (n < len(total) || len(s.Spec.Selector) == 0) {
			r.serviceProblem(name, "service %s: %d of %d endpoints are not ready: %s", name, n, len(total), some(unready))
		}
		if len(on) > 0 {
			r.judgeLocal(s, name, on)
		}
	}
}

func endpointName(e *discoveryv1.Endpoint) string {
	if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
		return e.TargetRef.Name
	}
	if len(e.Addresses) > 0 {
		return e.Addresses[0]
	}
	return "without an address"
}

// whyUnready returns why an endpoint is not ready, and false for a Pod that has just been made.
func (x *podIndex) whyUnready(namespace string, e *discoveryv1.Endpoint, now time.Time) (string, bool) {
	if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
		if p := x.byName[svc.Name{Namespace: namespace, Name: e.TargetRef.Name}]; p != nil {
			return base.PodTrouble(p), now.Sub(p.CreationTimestamp.Time) > pendingGrace
		}
	}
	if e.NodeName != nil {
		return "on node " + *e.NodeName, true
	}
	return "", true
}

// some lists names with their reasons, maxNamed at most.
func some(reasons map[string]string) string {
	var out []string
	for name, why := range reasons {
		if why != "" {
			name += " (" + why + ")"
		}
		out = append(out, name)
	}
	slices.Sort(out)
	if more := len(out) - maxNamed; more > 0 {
		out = append(out[:maxNamed], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, ", ")
}

// judgeLocal adds the nodes that drop connections because of a policy Local. A load balancer does not send to such nodes.
func (r *Report) judgeLocal(s *corev1.Service, name string, on map[string]bool) {
	var what, from string
	switch {
	case s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal:
		what, from = "internalTrafficPolicy", "from there"
	case s.Spec.Type == corev1.ServiceTypeNodePort && s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal:
		what, from = "externalTrafficPolicy", "to their node port"
	default:
		return
	}
	without := map[string]string{}
	for _, n := range r.Nodes {
		if n.Ready && !on[n.Name] {
			without[n.Name] = ""
		}
	}
	if len(without) > 0 {
		r.serviceProblem(name, "service %s: %s is Local, and there is no ready endpoint on %s: connections %s are dropped", name, what,
			some(without), from)
	}
}

// judgeCauses adds the Services that do not answer by the judgement of 'fairlead explain', unless another line is about them. An
// empty Service without a selector is judgeEmpty's.
func (r *Report) judgeCauses(services []corev1.Service, found []explaincmd.Finding) {
	empty := map[string]bool{}
	for i := range services {
		if len(services[i].Spec.Selector) == 0 {
			empty[services[i].Namespace+"/"+services[i].Name] = true
		}
	}
	named := map[string]bool{}
	for _, p := range r.ServiceProblems {
		named[p.Service] = true
	}
	for _, f := range found {
		if f.Cause == explain.NoEndpoint && empty[f.Service] || named[f.Service] {
			continue
		}
		r.serviceProblem(f.Service, "service %s: %s, %s: %s", f.Service, f.Answer, f.Cause, f.Text)
	}
}

// judgeSets adds rollouts that do not progress.
func (r *Report) judgeSets(o *related) {
	for i := range o.deployments {
		d := &o.deployments[i]
		for _, c := range d.Status.Conditions {
			failed := c.Type == appsv1.DeploymentReplicaFailure && c.Status == corev1.ConditionTrue
			if failed || c.Type == appsv1.DeploymentProgressing && c.Status == corev1.ConditionFalse {
				r.problem("deployment %s/%s does not progress: %s", d.Namespace, d.Name, cmp.Or(c.Message, c.Reason))
				break
			}
		}
	}
	for i := range o.daemonSets {
		d := &o.daemonSets[i]
		if e := o.warnings.of("DaemonSet", d, time.Time{}); e != nil && d.Status.NumberReady < d.Status.DesiredNumberScheduled {
			r.problem("daemonset %s/%s: %d of %d Pods are ready: %s", d.Namespace, d.Name, d.Status.NumberReady,
				d.Status.DesiredNumberScheduled, e.Message)
		}
	}
}

// judgeIngresses adds Ingresses that no controller has given an address. classes are all IngressClasses, nil if they are unknown.
func (r *Report) judgeIngresses(all []networkingv1.Ingress, classes []networkingv1.IngressClass, now time.Time) {
	ours := map[string]bool{}
	var served []string
	for i := range classes {
		if is, _ := names.OurIngressClass(&classes[i]); is {
			ours[classes[i].Name] = true
			served = append(served, classes[i].Name)
		}
	}
	if len(served) == 0 {
		ours[names.ClassName], served = true, []string{names.ClassName}
	}
	slices.Sort(served)
	for i := range all {
		g := &all[i]
		if len(g.Status.LoadBalancer.Ingress) > 0 || now.Sub(g.CreationTimestamp.Time) < pendingGrace {
			continue
		}
		switch class := names.ClassOf(g, ""); {
		case class == "":
			r.problem("ingress %s/%s has no class, and no controller serves it: set spec.ingressClassName", g.Namespace, g.Name)
		case ours[class]:
			front := names.SharedFront()
			if own, _ := fronts.Read(g.Annotations); own {
				front = svc.NameOf(g)
			}
			r.problem("ingress %s/%s has no address: look at service %s and at the Events of the Ingress", g.Namespace, g.Name,
				names.ServiceOfFront(front))
		default:
			r.problem("ingress %s/%s: no controller of class %s has given it an address; fairlead serves the class %s", g.Namespace, g.Name,
				class, strings.Join(served, ", "))
		}
	}
}

// judgeWarnings adds the recent Warnings about Services, unless another line has the text.
func (r *Report) judgeWarnings(services []corev1.Service, w warnings, now time.Time) {
	for i := range services {
		s := &services[i]
		e := w.of("Service", s, now.Add(-recent))
		if e == nil || slices.ContainsFunc(r.Problems, func(p string) bool { return strings.Contains(p, base.PlainLine(e.Message)) }) {
			continue
		}
		name := s.Namespace + "/" + s.Name
		r.serviceProblem(name, "service %s: %s: %s (%s ago)", name, e.Reason, e.Message, now.Sub(lastSeen(e)).Round(time.Second))
	}
}

// judgeLimits adds nodes that do not enforce limits that Pods on them have.
func (r *Report) judgeLimits(nodes []corev1.Node, pods []corev1.Pod) {
	limited := map[string]int{}
	for i := range pods {
		p := &pods[i]
		active := p.Status.Phase == corev1.PodRunning || p.Status.Phase == corev1.PodPending
		if active && slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return len(c.Resources.Limits) > 0 }) {
			limited[p.Spec.NodeName]++
		}
	}
	for i := range nodes {
		for _, c := range nodes[i].Status.Conditions {
			if n := limited[nodes[i].Name]; c.Type == svc.PodsLimited && c.Status == corev1.ConditionFalse && n > 0 {
				r.problem("node %s does not enforce the limits of %d Pods: %s", nodes[i].Name, n, cmp.Or(c.Message, c.Reason))
			}
		}
	}
}
