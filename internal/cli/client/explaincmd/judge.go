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
	j := &judging{cluster: cluster{nodes: map[string]*corev1.Node{}}, client: client, slices: map[svc.Name][]*discoveryv1.EndpointSlice{}}
	if err := j.read(ctx, namespace, names); err != nil {
		return nil, err
	}
	out := []Finding{}
	for _, s := range j.objects.Services {
		if f, wrong := j.service(ctx, s); wrong {
			out = append(out, f)
		}
	}
	return out, ctx.Err()
}

// judging has the objects that Judge reads. Pods are read where a Service does not answer.
type judging struct {
	cluster
	client kubernetes.Interface
	slices map[svc.Name][]*discoveryv1.EndpointSlice
	pods   map[string][]*corev1.Pod // of a namespace
}

// read gets the Services, by name or all of them, with their slices.
func (j *judging) read(ctx context.Context, namespace string, names []svc.Name) error {
	j.pods = map[string][]*corev1.Pod{}
	j.readNodes(ctx, j.client)
	j.settings(ctx, j.client)
	if len(names) == 0 {
		services, err := j.client.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		j.objects.Services = pointers(services.Items)
		return j.readSlices(ctx, namespace, "")
	}
	for _, n := range names {
		s, err := j.client.CoreV1().Services(n.Namespace).Get(ctx, n.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		j.objects.Services = append(j.objects.Services, s)
		if err := j.readSlices(ctx, n.Namespace, discoveryv1.LabelServiceName+"="+n.Name); err != nil {
			return err
		}
	}
	return nil
}

func (j *judging) readSlices(ctx context.Context, namespace, selector string) error {
	list, err := j.client.DiscoveryV1().EndpointSlices(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return err
	}
	slices.SortFunc(list.Items, func(a, b discoveryv1.EndpointSlice) int { return cmp.Compare(a.Name, b.Name) })
	for i := range list.Items {
		s := &list.Items[i]
		of := sliceOwner(s)
		j.slices[of] = append(j.slices[of], s)
	}
	return nil
}

// service judges one Service: on any node, or on each node if a policy Local makes them differ.
func (j *judging) service(ctx context.Context, s *corev1.Service) (Finding, bool) {
	internal := s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	external := s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	nodes := j.places(s)
	if !internal && !external {
		nodes = nodes[:1]
	}
	var best, worst *explain.Verdict
	for _, n := range nodes {
		v := j.verdict(ctx, s, n)
		if best == nil || explain.Worse(v.Answer, best.Answer) > 0 {
			best = v
		}
		if worst == nil || explain.Worse(v.Answer, worst.Answer) < 0 {
			worst = v
		}
	}
	switch {
	case fails(best):
		return findingOf(best), true
	case fails(worst) && (internal || s.Spec.Type == corev1.ServiceTypeNodePort): // a load balancer does not send to such nodes
		f := findingOf(worst)
		f.Answer = explain.Sometimes
		f.Text = fmt.Sprintf("on node %s: %s", worst.Node, f.Text)
		return f, true
	}
	return Finding{}, false
}

func fails(v *explain.Verdict) bool {
	return v.Answer != explain.Answers && v.Answer != explain.Elsewhere
}

// places are the nodes that a Service is judged on: the Nodes, or as the user may not read them, the nodes of its endpoints; at
// least one, maxNodes at most.
func (j *judging) places(s *corev1.Service) []string {
	out := j.names
	if len(out) == 0 {
		out = endpointNodes(j.slices[svc.NameOf(s)])
	}
	return out[:min(len(out), maxNodes)]
}

// verdict explains a Service on a node, with Pods only if it does not answer: they have the reason.
func (j *judging) verdict(ctx context.Context, s *corev1.Service, node string) *explain.Verdict {
	name := svc.NameOf(s)
	q := &explain.Question{Service: name}
	objects := explain.Objects{Services: []*corev1.Service{s}, Slices: j.slices[name], Node: j.nodes[node], Domains: j.objects.Domains,
		PodTrouble: base.PodTrouble}
	t := explain.Build(&j.ranges, node, j.nodes[node], objects.Services, objects.Slices)
	facts := explain.Assumed(node, "", t, explain.Choose(t, name, q.Address, 0))
	v := explain.Explain(q, &objects, facts)
	if fails(v) {
		objects.Pods = j.podsOf(ctx, name.Namespace)
		v = explain.Explain(q, &objects, facts)
	}
	return v
}

// podsOf reads the Pods of a namespace once; none if the user may not.
func (j *judging) podsOf(ctx context.Context, namespace string) []*corev1.Pod {
	pods, known := j.pods[namespace]
	if !known {
		if list, err := j.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{}); err == nil {
			pods = pointers(list.Items)
		}
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
