package walk

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/migrate/act"
	"github.com/fairlead/fairlead/internal/migrate/coredns"
	"github.com/fairlead/fairlead/internal/workloads"
)

// objects are fairlead's.
func (w *Walk) objects(joined bool) []runtime.Object {
	return append(slices.Clone(w.rest), w.plan.Ours(w.base, joined, w.Image))
}

// install applies fairlead's objects and waits until all Pods are of their template and ready.
func (w *Walk) install(ctx context.Context, joined bool) error {
	if err := w.act.Apply(ctx, w.objects(joined)); err != nil {
		return err
	}
	return w.act.Within(ctx, func(ctx context.Context) error {
		d, err := w.Client.AppsV1().Deployments(w.base.Namespace).Get(ctx, coredns.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s, want := &d.Status, *d.Spec.Replicas
		if s.ObservedGeneration < d.Generation {
			return fmt.Errorf("the controller of Deployments has not seen the change of %s", d.Name)
		}
		if s.UpdatedReplicas == want && s.ReadyReplicas == want && s.Replicas == want {
			return nil
		}
		return fmt.Errorf("the Deployment %s has %d of %d Pods updated and ready%s", d.Name, min(s.UpdatedReplicas, s.ReadyReplicas), want,
			w.why(ctx, d))
	})
}

// why is what a Pod of a Deployment that is not ready waits for.
func (w *Walk) why(ctx context.Context, d *appsv1.Deployment) string {
	pods, err := w.pods(ctx, d.Spec.Selector.MatchLabels)
	if err != nil {
		return ""
	}
	for _, p := range pods {
		if report := act.Report(p); report != "" && !workloads.IsReady(p) {
			return fmt.Sprintf("; the Pod %s: %s %s", p.Name, p.Status.Phase, report)
		}
	}
	return ""
}

// pods returns the Pods of CoreDNS or of fairlead.
func (w *Walk) pods(ctx context.Context, selector map[string]string) (out []*corev1.Pod, err error) {
	which := metav1.ListOptions{LabelSelector: labels.SelectorFromSet(selector).String()}
	list, err := w.Client.CoreV1().Pods(w.base.Namespace).List(ctx, which)
	if err != nil {
		return nil, err
	}
	_, ours := selector[coredns.PodLabel]
	for i := range list.Items {
		p := &list.Items[i]
		// fairlead's Pods have CoreDNS's labels, too.
		if _, has := p.Labels[coredns.PodLabel]; has == ours {
			out = append(out, p)
		}
	}
	return out, nil
}

// ready returns the addresses of Pods that are ready, one for each.
func (w *Walk) ready(ctx context.Context, selector map[string]string) (out []string, err error) {
	pods, err := w.pods(ctx, selector)
	for _, p := range pods {
		if workloads.IsReady(p) && p.DeletionTimestamp == nil && p.Status.PodIP != "" {
			out = append(out, p.Status.PodIP)
		}
	}
	return out, err
}

// behindFairlead returns nil if the Service has the addresses of all of fairlead's Pods, and no others if it selects no others.
func (w *Walk) behindFairlead(ctx context.Context) error {
	service, err := w.service(ctx)
	if err != nil {
		return err
	}
	if err := w.behind(ctx, coredns.Selector(), "fairlead dns"); err != nil {
		return err
	}
	if _, narrow := service.Spec.Selector[coredns.PodLabel]; !narrow {
		return nil
	}
	theirs, _, _ := w.plan.Theirs()
	return w.without(ctx, theirs.Spec.Selector.MatchLabels)
}

func (w *Walk) behindCoreDNS(ctx context.Context) error {
	theirs, _, _ := w.plan.Theirs()
	return w.behind(ctx, theirs.Spec.Selector.MatchLabels, "CoreDNS")
}

// behind returns nil if the Service leads to all of a program's Pods, as many as CoreDNS has had.
func (w *Walk) behind(ctx context.Context, selector map[string]string, program string) error {
	_, replicas, service := w.plan.Theirs()
	pods, err := w.ready(ctx, selector)
	if err != nil {
		return err
	}
	if len(pods) < int(replicas) {
		return fmt.Errorf("%d of %d Pods of %s are ready", len(pods), replicas, program)
	}
	list, err := w.slices(ctx)
	if err != nil {
		return err
	}
	for _, a := range pods {
		if !slices.ContainsFunc(list, func(s discoveryv1.EndpointSlice) bool { return has(&s, a) }) {
			return fmt.Errorf("the Service %s does not have the address %s of %s yet", service.Name, a, program)
		}
	}
	return nil
}

// without returns nil if the Service leads to none of a program's Pods.
func (w *Walk) without(ctx context.Context, selector map[string]string) error {
	pods, err := w.ready(ctx, selector)
	if err != nil {
		return err
	}
	list, err := w.slices(ctx)
	if err != nil {
		return err
	}
	for _, a := range pods {
		if slices.ContainsFunc(list, func(s discoveryv1.EndpointSlice) bool { return has(&s, a) }) {
			return fmt.Errorf("the Service still has the address %s", a)
		}
	}
	return nil
}

// service is the Service as it is now.
func (w *Walk) service(ctx context.Context) (*corev1.Service, error) {
	_, _, s := w.plan.Theirs()
	return w.Client.CoreV1().Services(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
}

// slices are the EndpointSlices of the Service.
func (w *Walk) slices(ctx context.Context) ([]discoveryv1.EndpointSlice, error) {
	_, _, service := w.plan.Theirs()
	list, err := w.Client.DiscoveryV1().EndpointSlices(service.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + service.Name,
	})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// selectOnlyOurs makes the Service select only fairlead's Pods, or what it selected before. A conflict is tried again.
func (w *Walk) selectOnlyOurs(ctx context.Context, only bool) error {
	s, err := w.service(ctx)
	if err != nil {
		return err
	}
	selector := w.plan.Selected()
	if only {
		maps.Copy(selector, coredns.Selector())
	}
	if maps.Equal(s.Spec.Selector, selector) {
		return nil
	}
	s.Spec.Selector = selector
	_, err = w.Client.CoreV1().Services(s.Namespace).Update(ctx, s, metav1.UpdateOptions{FieldManager: act.Manager})
	return err
}

// leave takes the labels that the Service selects from fairlead's Pods, and waits until it does not lead to them. The Pods stay
// with their ReplicaSet, which selects another label.
func (w *Walk) leave(ctx context.Context) error {
	pods, err := w.pods(ctx, coredns.Selector())
	if err != nil {
		return err
	}
	for _, p := range pods {
		gone := false
		for k := range w.plan.Selected() {
			_, has := p.Labels[k]
			gone = gone || has
			delete(p.Labels, k)
		}
		if !gone || p.DeletionTimestamp != nil {
			continue
		}
		if _, err := w.Client.CoreV1().Pods(p.Namespace).Update(ctx, p, metav1.UpdateOptions{FieldManager: act.Manager}); err != nil {
			return err
		}
	}
	return w.without(ctx, coredns.Selector())
}

// has reports whether a slice has an address that is ready.
func has(s *discoveryv1.EndpointSlice, address string) bool {
	return slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
		return slices.Contains(e.Addresses, address) && (e.Conditions.Ready == nil || *e.Conditions.Ready)
	})
}

// noCoreDNS returns nil if no Pod of CoreDNS is left.
func (w *Walk) noCoreDNS(ctx context.Context) error {
	theirs, _, _ := w.plan.Theirs()
	pods, err := w.pods(ctx, theirs.Spec.Selector.MatchLabels)
	if err == nil && len(pods) > 0 {
		err = fmt.Errorf("the Pod %s still runs", pods[0].Name)
	}
	return err
}

// remove deletes fairlead's objects. Their account stays until the Pods have ended, which still answer.
func (w *Walk) remove(ctx context.Context) error {
	all := w.objects(true)
	if err := w.act.Remove(ctx, all[len(all)-1:]); err != nil {
		return err
	}
	err := w.act.Within(ctx, func(ctx context.Context) error {
		pods, err := w.pods(ctx, coredns.Selector())
		if err == nil && len(pods) > 0 {
			err = fmt.Errorf("the Pod %s still runs", pods[0].Name)
		}
		return err
	})
	if err != nil {
		return err
	}
	return w.act.Remove(ctx, all[:len(all)-1])
}

// compare asks all of fairlead's Pods and one of CoreDNS's the questions.
func (w *Walk) compare(ctx context.Context) error {
	theirs, _, _ := w.plan.Theirs()
	like, err := w.ready(ctx, theirs.Spec.Selector.MatchLabels)
	if err == nil && len(like) == 0 {
		err = errors.New("no Pod of CoreDNS is ready")
	}
	if err != nil {
		return err
	}
	servers, err := w.ready(ctx, coredns.Selector())
	if err == nil && len(servers) == 0 {
		err = errors.New("no Pod of fairlead dns is ready")
	}
	if err != nil {
		return err
	}
	port, _ := w.plan.Ports()
	return w.ask(ctx, withPort(servers, port), withPort(like, port)[0])
}

// verify asks the Service's addresses the questions, and a Pod of fairlead.
func (w *Walk) verify(ctx context.Context) error {
	_, _, service := w.plan.Theirs()
	like, err := w.ready(ctx, coredns.Selector())
	if err == nil && len(like) == 0 {
		err = errors.New("no Pod of fairlead dns is ready")
	}
	if err != nil {
		return err
	}
	pods, err := w.pods(ctx, coredns.Selector())
	if err != nil {
		return err
	}
	var servers []string
	for _, a := range service.Spec.ClusterIPs {
		if slices.ContainsFunc(pods, func(p *corev1.Pod) bool { return hasFamily(p, a) }) {
			servers = append(servers, a)
		}
	}
	ofPods, ofService := w.plan.Ports()
	return w.ask(ctx, withPort(servers, ofService), withPort(like, ofPods)[0])
}

// hasFamily reports whether a Pod has an address of the family of a: a Service may have one of a family that its Pods lack.
func hasFamily(p *corev1.Pod, a string) bool {
	return slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool { return strings.Contains(ip.IP, ":") == strings.Contains(a, ":") })
}

// withPort gives addresses a port.
func withPort(addresses []string, port int32) (out []string) {
	for _, a := range addresses {
		out = append(out, net.JoinHostPort(a, strconv.Itoa(int(port))))
	}
	return out
}

// ask runs the Pod that compares.
func (w *Walk) ask(ctx context.Context, servers []string, like string) error {
	questions := w.plan.Questions()
	if len(questions) == 0 {
		return fmt.Errorf("there are no questions to compare answers by: %s", strings.Join(w.plan.Refused, "; "))
	}
	ctx, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
	return w.act.RunPod(ctx, coredns.PodFor(w.plan.Ours(w.base, false, w.Image), servers, like, questions, w.Timeout))
}
