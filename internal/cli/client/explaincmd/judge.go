package explaincmd

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
)

// Finding is a Service that not every client reaches, by what the API has. Its JSON form is meant for programs: fields are only
// ever added.
type Finding struct {
	Service string         `json:"service"`
	Answer  explain.Answer `json:"answer"`
	Cause   explain.Cause  `json:"cause,omitempty"`
	// Remedy is what to do about the Cause.
	Remedy string `json:"remedy,omitempty"`
	// Line is the statement that the answer follows from, with its source.
	explain.Line
}

// Judge explains Services by the objects of the API, without a question to any node, and returns the Services that do not answer
// or only do on some nodes. Without names it judges all Services of a namespace, or all that there are if that is empty.
func Judge(ctx context.Context, client kubernetes.Interface, namespace string, names ...svc.Name) ([]Finding, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	j := newJudging()
	j.readPods = func(namespace string) []*corev1.Pod {
		list, err := base.Paged[*corev1.PodList, corev1.Pod](ctx, metav1.ListOptions{}, client.CoreV1().Pods(namespace).List, nil)
		if err != nil {
			return nil
		}
		return list
	}
	if err := j.read(ctx, client, namespace, names); err != nil {
		return nil, err
	}
	return j.all(), ctx.Err()
}

// JudgeObjects is Judge for objects that have been read: services are judged, by all of their slices, all nodes (none if they may
// not be read) and all Pods of their namespaces.
func JudgeObjects(services []corev1.Service, all []discoveryv1.EndpointSlice, nodes []corev1.Node, pods []corev1.Pod) []Finding {
	j := newJudging()
	j.objects.Services = pointers(services)
	j.putNodes(pointers(nodes))
	j.putSlices(pointers(all))
	for i := range pods {
		j.pods[pods[i].Namespace] = append(j.pods[pods[i].Namespace], &pods[i])
	}
	j.readPods = func(string) []*corev1.Pod { return nil }
	return j.all()
}

// judging has the objects of Judge. Pods are read where a Service does not answer.
type judging struct {
	cluster
	slices map[svc.Name][]*discoveryv1.EndpointSlice
	pods   map[string][]*corev1.Pod // of a namespace
	// readPods reads the Pods of a namespace, none if the user may not.
	readPods func(namespace string) []*corev1.Pod
}

func newJudging() *judging {
	return &judging{cluster: cluster{nodes: map[string]*corev1.Node{}}, slices: map[svc.Name][]*discoveryv1.EndpointSlice{},
		pods: map[string][]*corev1.Pod{}}
}

func (j *judging) all() []Finding {
	out := []Finding{}
	for _, s := range j.objects.Services {
		if f, wrong := j.service(s); wrong {
			out = append(out, f)
		}
	}
	return out
}

// read gets the Services, by name or all of them, with their slices.
func (j *judging) read(ctx context.Context, client kubernetes.Interface, namespace string, names []svc.Name) error {
	j.readNodes(ctx, client)
	j.settings(ctx, client)
	if len(names) == 0 {
		services, err := base.Paged[*corev1.ServiceList, corev1.Service](ctx, metav1.ListOptions{}, client.CoreV1().Services(namespace).List, nil)
		if err != nil {
			return err
		}
		j.objects.Services = services
		return j.readSlices(ctx, client, namespace, "")
	}
	for _, n := range names {
		s, err := client.CoreV1().Services(n.Namespace).Get(ctx, n.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		j.objects.Services = append(j.objects.Services, s)
		if err := j.readSlices(ctx, client, n.Namespace, discoveryv1.LabelServiceName+"="+n.Name); err != nil {
			return err
		}
	}
	return nil
}

func (j *judging) readSlices(ctx context.Context, client kubernetes.Interface, namespace, selector string) error {
	list, err := base.Paged[*discoveryv1.EndpointSliceList, discoveryv1.EndpointSlice](ctx, metav1.ListOptions{LabelSelector: selector},
		client.DiscoveryV1().EndpointSlices(namespace).List, nil)
	if err != nil {
		return err
	}
	j.putSlices(list)
	return nil
}

func (j *judging) putSlices(list []*discoveryv1.EndpointSlice) {
	slices.SortFunc(list, func(a, b *discoveryv1.EndpointSlice) int { return cmp.Compare(a.Name, b.Name) })
	for _, s := range list {
		of := sliceOwner(s)
		j.slices[of] = append(j.slices[of], s)
	}
}

// service judges one Service: on any node, or on each node if a policy Local makes them differ.
func (j *judging) service(s *corev1.Service) (Finding, bool) {
	internal := s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	external := s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	everywhere := internal || external && s.Spec.Type == corev1.ServiceTypeNodePort // a load balancer does not send to nodes without one
	var best, worst *explain.Verdict
	for _, n := range j.places(s, internal || external) {
		v := j.verdict(s, n)
		if best == nil || explain.Worse(v.Answer, best.Answer) > 0 {
			best = v
		}
		if worst == nil || explain.Worse(v.Answer, worst.Answer) < 0 {
			worst = v
		}
		if !fails(best) && (fails(worst) || !everywhere) {
			break
		}
	}
	switch {
	case fails(best):
		return findingOf(best), true
	case fails(worst) && everywhere:
		f := findingOf(worst)
		f.Answer = explain.Sometimes
		f.Text = fmt.Sprintf("on node %s: %s", worst.Node, f.Text)
		return f, true
	}
	return Finding{}, false
}

func fails(v *explain.Verdict) bool {
	return v.Answer != explain.Answers && v.Answer != explain.Sent && v.Answer != explain.Elsewhere
}

// places are the nodes that a Service is judged on, at least one: of a policy Local the Nodes of its endpoints, and one without
// any, for all of these answer alike; else any Node. As the user may not read Nodes, they are the nodes of its endpoints.
func (j *judging) places(s *corev1.Service, local bool) []string {
	with := endpointNodes(j.slices[svc.NameOf(s)])
	switch {
	case len(j.names) == 0 && local:
		return with
	case len(j.names) == 0:
		return with[:1]
	case !local:
		return j.names[:1]
	}
	var out []string
	has := map[string]bool{}
	for _, n := range with {
		has[n] = true
		if j.nodes[n] != nil {
			out = append(out, n)
		}
	}
	if i := slices.IndexFunc(j.names, func(n string) bool { return !has[n] }); i >= 0 {
		out = append(out, j.names[i])
	}
	return out
}

// verdict explains a Service on a node, with Pods only if it does not answer: they have the reason.
func (j *judging) verdict(s *corev1.Service, node string) *explain.Verdict {
	name := svc.NameOf(s)
	q := &explain.Question{Service: name}
	objects := explain.Objects{Services: []*corev1.Service{s}, Slices: j.slices[name], Node: j.nodes[node], Domains: j.objects.Domains,
		PodTrouble: base.PodTrouble}
	t := explain.Build(&j.ranges, node, j.nodes[node], objects.Services, objects.Slices)
	facts := explain.Assumed(node, "", t, explain.Choose(t, name, q.Address, 0))
	v := explain.Explain(q, &objects, facts)
	if fails(v) {
		objects.Pods = j.podsOf(name.Namespace)
		v = explain.Explain(q, &objects, facts)
	}
	return v
}

// podsOf are the Pods of a namespace, which are read once.
func (j *judging) podsOf(namespace string) []*corev1.Pod {
	pods, known := j.pods[namespace]
	if !known {
		pods = j.readPods(namespace)
		j.pods[namespace] = pods
	}
	return pods
}

// findingOf takes the last line of the frontend with the answer, which is the decision, else that of the Service.
func findingOf(v *explain.Verdict) Finding {
	f := Finding{Service: v.Service, Answer: v.Answer, Cause: v.Cause, Remedy: v.Remedy}
	lines := v.Lines
	for i := range v.Frontends {
		if at := &v.Frontends[i]; at.Answer == v.Answer && at.Cause == v.Cause && len(at.Lines) > 0 {
			lines = at.Lines
			break
		}
	}
	if len(lines) > 0 {
		f.Line = lines[len(lines)-1]
		f.Text = base.PlainLine(f.Text)
	}
	return f
}
