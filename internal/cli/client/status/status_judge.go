package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// pendingGrace is how long a Pod may take to start, and nodes to program a Service, before that
// is a problem.
const pendingGrace = 10 * time.Second

// ownConditions begins the types of the Node conditions that are True when all is well.
const ownConditions = "fairlead.dev/"

// maxLooks bounds how many Pods are looked at for one Service.
const maxLooks = 100

// problem adds a problem. Much of its text was written by whoever may write a Pod's
// status, so it becomes one plain line.
func (r *Report) problem(format string, args ...any) {
	r.Problems = append(r.Problems, base.PlainLine(fmt.Sprintf(format, args...)))
}

// serviceProblem adds a problem that is about one Service, NAMESPACE/NAME.
func (r *Report) serviceProblem(name, format string, args ...any) {
	r.problem(format, args...)
	r.ServiceProblems = append(r.ServiceProblems, serviceProblem{name, r.Problems[len(r.Problems)-1]})
}

// judgeNodes adds what is wrong with nodes, in their own words where they have some.
func (r *Report) judgeNodes(nodes []corev1.Node) {
	if len(r.Nodes) == 0 {
		r.problem("no node has joined: start one with 'fairlead agent' or 'fairlead up'")
	}
	for i, n := range r.Nodes {
		if !n.Ready {
			r.problem("node %s is not Ready: %s", n.Name, r.notReady(&nodes[i]))
		}
		s := n.Programmed
		if s != nil {
			if !s.Programmed {
				r.problem("node %s: services are not programmed: %s: %s", n.Name, s.Reason, s.Message)
			}
			if s.Programmed && s.LastError != "" { // of ports that the mode has rejected
				r.problem("node %s: some ports are not programmed: %s", n.Name, s.LastError)
			}
			for _, p := range s.Problems {
				if r.scope.has(p.Service) {
					r.serviceProblem(p.Service, "node %s: service %s: %s", n.Name, p.Service, p.Message)
				}
			}
		}
		for _, c := range nodes[i].Status.Conditions {
			own := strings.HasPrefix(string(c.Type), ownConditions)
			switch {
			case c.Type == svc.PodsLimited || c.Type == svc.PodsConfined: // how the machine is, no fault; Pods that it concerns have an Event
			case c.Type == svc.NodeLocalDNS: // names are answered all the same
			case !n.Ready || c.Type == corev1.NodeReady || c.Type == svc.ServicesProgrammed && s != nil:
			case own && c.Status == corev1.ConditionFalse, !own && c.Status == corev1.ConditionTrue:
				r.problem("node %s: %s is %s: %s", n.Name, c.Type, c.Status, cmp.Or(c.Message, c.Reason, "no reason given"))
			}
		}
	}
}

// notReady returns why a node is not Ready: in its own words, or in the words of the part that noticed it.
func (r *Report) notReady(n *corev1.Node) string {
	since := time.Time{}
	for _, c := range n.Status.Conditions {
		if c.Type != corev1.NodeReady {
			continue
		}
		if c.Status == corev1.ConditionFalse && c.Message != "" {
			return c.Message
		}
		since = c.LastTransitionTime.Add(-time.Minute)
	}
	if e := r.warnings.of("Node", n, since); e != nil {
		return e.Message
	}
	return "its agent does not run, or cannot reach the server"
}

// judgeServices adds what is wrong with Services.
func (r *Report) judgeServices(services []corev1.Service, pods *podIndex) {
	for i := range services {
		s, counts := &services[i], r.Services[i]
		name := s.Namespace + "/" + s.Name
		if s.Spec.Type == corev1.ServiceTypeExternalName {
			continue
		}
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer && len(s.Status.LoadBalancer.Ingress) == 0 {
			provider := "no provider"
			if c := s.Spec.LoadBalancerClass; c != nil {
				provider += " of class " + *c
			}
			why := provider + " has given it one"
			if e := r.warnings.of("Service", s, time.Time{}); e != nil {
				why = e.Message
			}
			r.serviceProblem(name, "service %s has no load balancer address: %s", name, why)
		}
		if len(s.Spec.Selector) == 0 {
			if counts.Total == 0 {
				r.judgeEmpty(s, name)
			}
			continue
		}
		if counts.Ready == 0 {
			r.serviceProblem(name, "service %s has no ready endpoint: connections are refused (%s)", name, pods.whyNone(s, counts.Total))
		}
		r.judgePorts(s, name, pods)
	}
}

// whyNone returns why no endpoint of a Service is ready.
func (x *podIndex) whyNone(s *corev1.Service, endpoints int) string {
	if hint := x.unmatched(s.Namespace, s.Spec.Selector); hint != "" {
		return hint
	}
	reasons := map[string]string{}
	for _, p := range x.matching(s.Namespace, s.Spec.Selector) {
		if p.DeletionTimestamp == nil {
			reasons[p.Name] = base.PodTrouble(p)
		}
	}
	if len(reasons) == 0 || endpoints == 0 {
		return fmt.Sprintf("selector %s, %d endpoints not ready", selectorText(s.Spec.Selector), endpoints)
	}
	return "not ready: " + some(reasons)
}

// judgeProgrammed adds the Services that ask whether nodes have programmed them, and have waited
// longer for that than a change takes. How long an outdated condition has been one is not known.
func (r *Report) judgeProgrammed(now time.Time) {
	for _, s := range r.Services {
		c := s.Programmed
		if c == nil || c.Status == metav1.ConditionTrue || c.Reason == reasonOutdated {
			continue
		}
		if now.Sub(c.LastTransitionTime.Time) > pendingGrace {
			name := s.Namespace + "/" + s.Name
			r.serviceProblem(name, "service %s is not programmed on every node: %s", name, cmp.Or(c.Message, c.Reason))
		}
	}
}

// judgeEmpty adds that a Service without a selector has no endpoints.
func (r *Report) judgeEmpty(s *corev1.Service, name string) {
	switch {
	case s.Labels[names.FrontLabel] != "": // its routes name the endpoints
	case len(r.Nodes) == 0 && s.Namespace == metav1.NamespaceSystem: // kube-dns: the missing nodes are named
	case name == "default/kubernetes":
		r.serviceProblem(name, "service %s has no endpoints: Pods cannot reach the API; "+
			"start the server with an address that they reach, --bind-address 127.0.0.1,ADDRESS", name)
	default:
		r.serviceProblem(name, "service %s has no selector and no endpoints: connections are refused until it gets one or the other", name)
	}
}

// judgePorts adds the ports of a Service that lead to none of its Pods.
func (r *Report) judgePorts(s *corev1.Service, name string, pods *podIndex) {
	matching := pods.matching(s.Namespace, s.Spec.Selector)
	if !pods.whole || len(matching) == 0 {
		return
	}
	for j := range s.Spec.Ports {
		port := &s.Spec.Ports[j]
		target := port.TargetPort
		if target == (intstr.IntOrString{}) {
			target = intstr.FromInt32(port.Port)
		}
		declared, found := map[string]bool{}, false
		if other := otherProtocol(matching, port, target); other != "" {
			r.serviceProblem(name, "service %s: port %d/%s leads to port %s, which its Pods have for %s", name, port.Port,
				cmp.Or(port.Protocol, corev1.ProtocolTCP), target.String(), other)
			continue
		}
		for _, p := range matching {
			if found = hasPort(p, port, target, declared); found {
				break
			}
		}
		if found {
			continue
		}
		known := "they declare none"
		if len(declared) > 0 {
			known = "they have " + strings.Join(slices.Sorted(maps.Keys(declared)), ", ")
		}
		r.serviceProblem(name, "service %s: port %d leads to port %s, which none of its Pods has (%s)", name, port.Port, target.String(), known)
	}
}

// otherProtocol returns the protocol for which all Pods declare the number that a Service's port leads to, if none
// declares it for the port's protocol; else "".
func otherProtocol(pods []*corev1.Pod, port *corev1.ServicePort, target intstr.IntOrString) (other corev1.Protocol) {
	if target.Type != intstr.Int {
		return ""
	}
	for _, p := range pods {
		here := corev1.Protocol("")
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			for _, cp := range c.Ports {
				if cp.ContainerPort != target.IntVal {
					continue
				}
				if here = cmp.Or(cp.Protocol, corev1.ProtocolTCP); here == cmp.Or(port.Protocol, corev1.ProtocolTCP) {
					return ""
				}
			}
		}
		if here == "" {
			return ""
		}
		other = here
	}
	return other
}

// hasPort reports whether a Pod may listen on the target of a Service's port. One
// that is named must be declared; a number need not be, in a Pod that declares none of
// the protocol. The declared ports are added to declared.
func hasPort(p *corev1.Pod, port *corev1.ServicePort, target intstr.IntOrString, declared map[string]bool) bool {
	if target.Type == intstr.String {
		if _, ok := epslice.TargetPort(p, port); ok {
			return true
		}
	}
	any := false
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		for _, cp := range c.Ports {
			if cmp.Or(cp.Protocol, corev1.ProtocolTCP) != cmp.Or(port.Protocol, corev1.ProtocolTCP) {
				continue
			}
			if target.Type == intstr.Int && cp.ContainerPort == target.IntVal {
				return true
			}
			any = true
			number := strconv.Itoa(int(cp.ContainerPort))
			if cp.Name != "" {
				number = cp.Name + "=" + number
			}
			declared[number] = true
		}
	}
	return target.Type == intstr.Int && !any
}

// judgePods adds the Pods that do not start or do not stay up. Those of one owner with one reason are one line.
func (r *Report) judgePods(pods []corev1.Pod, now time.Time) {
	type group struct{ owner, reason string }
	first, count := map[group]int{}, map[group]int{}
	for i := range pods {
		p := &pods[i]
		if p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		text := ""
		waiting := waitingReason(p)
		switch {
		case waiting != "":
			text = ": " + waiting
		case p.Status.Phase == corev1.PodPending && (unschedulable(p) || now.Sub(p.CreationTimestamp.Time) > pendingGrace):
			text = " is Pending: " + base.PodTrouble(p)
		default:
			continue
		}
		reason, _, _ := strings.Cut(strings.TrimPrefix(text, ": "), ":")
		g := group{ownerOf(p), reason}
		if g.owner != "" {
			if count[g]++; count[g] > 1 {
				continue
			}
			first[g] = len(r.Problems)
		}
		r.problem("pod %s/%s%s", p.Namespace, p.Name, text)
	}
	for g, i := range first {
		if n := count[g]; n > 1 {
			r.Problems[i] = base.PlainLine(fmt.Sprintf("%s: %d Pods alike; the first, %s", g.owner, n, r.Problems[i]))
		}
	}
}

// ownerOf returns what a user knows as the owner of a Pod: the Deployment of its ReplicaSet, or its controller; "" for none.
func ownerOf(p *corev1.Pod) string {
	o := metav1.GetControllerOf(p)
	if o == nil {
		return ""
	}
	kind, name := strings.ToLower(o.Kind), o.Name
	if hash := p.Labels[appsv1.DefaultDeploymentUniqueLabelKey]; kind == "replicaset" && hash != "" {
		kind, name = "deployment", strings.TrimSuffix(name, "-"+hash)
	}
	return kind + " " + p.Namespace + "/" + name
}

// waitingReason returns why a container of a Pod waits, such as CrashLoopBackOff; ""
// if none does, or only for its first start.
func waitingReason(p *corev1.Pod) string {
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		w := c.State.Waiting
		if w == nil || w.Reason == "" || w.Reason == "ContainerCreating" || w.Reason == "PodInitializing" {
			continue
		}
		text := w.Reason
		if w.Message != "" {
			text += ": " + w.Message
		}
		if t := c.LastTerminationState.Terminated; t != nil {
			if t.Message != "" {
				text += ": " + t.Message
			}
			text += fmt.Sprintf(" (container %s, %d restarts, last exit code %d)", c.Name, c.RestartCount, t.ExitCode)
		}
		return text
	}
	return ""
}

func unschedulable(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Message != ""
	})
}

func selectorText(selector map[string]string) string {
	return metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: selector})
}
