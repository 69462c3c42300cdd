package status

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/apiserver/certs"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd"
	"github.com/fairlead/fairlead/internal/gateway/names"
	lbv1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
)

// endpoint is one of a Pod on a node.
func endpoint(pod, node string, ready bool) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses: []string{"10.0.0.1"}, NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: pod},
	}
}

func sliceOf(service string, endpoints ...discoveryv1.Endpoint) discoveryv1.EndpointSlice {
	return discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		Endpoints:  endpoints,
	}
}

// Whatever is wrong with endpoints, sets, Ingresses, limits and ports is named with its cause.
func TestStatusNamesCauses(t *testing.T) {
	now := time.Now()
	old := metav1.NewTime(now.Add(-time.Hour))
	running := func(name string) corev1.Pod {
		p := labelled(name, "app=web")
		p.CreationTimestamp = old
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
		return p
	}
	fresh := running("fresh")
	fresh.CreationTimestamp = metav1.NewTime(now)
	web := service("web", intstr.FromInt32(9376), "app=web")
	local := service("local", intstr.FromInt32(9376), "app=web")
	local.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
	port := service("port", intstr.FromInt32(9376), "app=web")
	port.Spec.Type, port.Spec.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, corev1.ServiceExternalTrafficPolicyLocal
	dns := service("dns", intstr.FromInt32(9376), "app=web")
	dns.Spec.Ports[0].Protocol = corev1.ProtocolUDP
	pods := newPodIndex([]corev1.Pod{running("a"), running("b"), fresh}, true)
	causes := func(r *Report, kind corev1.ServiceType, change func(*discoveryv1.EndpointSlice)) {
		s, one := service("web", intstr.FromInt32(9376), "app=web"), sliceOf("web", endpoint("a", "n1", true))
		s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.10", []string{"10.96.0.10"}
		if s.Spec.Type = kind; kind == corev1.ServiceTypeNodePort {
			s.Spec.ExternalTrafficPolicy, s.Spec.Ports[0].NodePort = corev1.ServiceExternalTrafficPolicyLocal, 30080
			s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
		}
		one.AddressType, one.Ports = discoveryv1.AddressTypeIPv4, []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(9376))}}
		change(&one)
		services, all := []corev1.Service{s}, []discoveryv1.EndpointSlice{one}
		nodes := []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, {ObjectMeta: metav1.ObjectMeta{Name: "n2"}}}
		r.Services = serviceReports(services, all)
		r.judgeServices(services, pods)
		r.judgeEndpoints(services, all, pods, now)
		r.judgeCauses(services, explaincmd.JudgeObjects(services, all, nodes, []corev1.Pod{running("a")}))
	}
	for name, c := range map[string]struct {
		judge func(r *Report)
		want  []string
	}{
		"unready endpoints": {func(r *Report) {
			one := sliceOf("web", endpoint("a", "n1", true), endpoint("b", "n1", false), endpoint("fresh", "n1", false))
			r.judgeEndpoints([]corev1.Service{web}, []discoveryv1.EndpointSlice{one}, pods, now)
		}, []string{"service default/web: 1 of 3 endpoints are not ready: b (running, its readiness probe does not pass)"}},
		"no ready endpoint written by hand": {func(r *Report) {
			hand := service("hand", intstr.FromInt32(9376))
			one := sliceOf("hand", endpoint("x", "n1", false))
			one.Endpoints[0].TargetRef = nil
			r.judgeEndpoints([]corev1.Service{hand}, []discoveryv1.EndpointSlice{one}, pods, now)
		}, []string{"service default/hand: 1 of 1 endpoints are not ready: 10.0.0.1 (on node n1)"}},
		"no ready endpoint": {func(r *Report) {
			services := []corev1.Service{web}
			one := sliceOf("web", endpoint("a", "n1", false), endpoint("b", "n1", false))
			r.Services = serviceReports(services, []discoveryv1.EndpointSlice{one})
			r.judgeServices(services, newPodIndex([]corev1.Pod{running("a"), running("b")}, true))
		}, []string{"service default/web has no ready endpoint: connections are refused (not ready: a (running, its readiness probe " +
			"does not pass), b (running, its readiness probe does not pass))"}},
		"all are ready": {func(r *Report) {
			r.judgeEndpoints([]corev1.Service{web}, []discoveryv1.EndpointSlice{sliceOf("web", endpoint("a", "n1", true))}, pods, now)
		}, nil},
		"policy Local": {func(r *Report) {
			all := []discoveryv1.EndpointSlice{sliceOf("local", endpoint("a", "n1", true)), sliceOf("port", endpoint("a", "n1", true))}
			r.judgeEndpoints([]corev1.Service{local, port}, all, pods, now)
		}, []string{
			"service default/local: internalTrafficPolicy is Local, and there is no ready endpoint on n2: connections from there are dropped",
			"service default/port: externalTrafficPolicy is Local, and there is no ready endpoint on n2: connections to their node port are dropped",
		}},
		"weights of 0": {func(r *Report) {
			causes(r, corev1.ServiceTypeClusterIP, func(e *discoveryv1.EndpointSlice) {
				e.Annotations = map[string]string{svc.WeightAnnotation: "0"}
			})
		}, []string{"service default/web: refused, WeightZero: all 1 endpoints that are ready have weight 0"}},
		"policy Local, and no endpoint has a node": {func(r *Report) {
			causes(r, corev1.ServiceTypeNodePort, func(e *discoveryv1.EndpointSlice) { e.Endpoints[0].NodeName = nil })
		}, []string{"service default/web: timeout, PolicyLocal: policy Local sends connections only to endpoints of node n1, which has none: " +
			"they are dropped"}},
		"policy Local, with an endpoint": {func(r *Report) {
			causes(r, corev1.ServiceTypeNodePort, func(e *discoveryv1.EndpointSlice) { e.Endpoints[0].NodeName = new("n1") })
		}, []string{"service default/web: internalTrafficPolicy is Local, and there is no ready endpoint on n2: connections from there are " +
			"dropped"}},
		"another protocol": {func(r *Report) { r.judgePorts(&dns, "default/dns", pods) },
			[]string{"service default/dns: port 80/UDP leads to port 9376, which its Pods have for TCP"}},
		"a rollout": {func(r *Report) {
			d := appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
			d.Status.Conditions = []appsv1.DeploymentCondition{
				{Type: appsv1.DeploymentProgressing, Status: corev1.ConditionFalse, Message: "it has timed out progressing"},
			}
			r.judgeSets(&related{deployments: []appsv1.Deployment{d}})
		}, []string{"deployment default/web does not progress: it has timed out progressing"}},
		"Ingresses": {func(r *Report) {
			one := networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one", CreationTimestamp: old}}
			two, own, served, young := *one.DeepCopy(), *one.DeepCopy(), *one.DeepCopy(), *one.DeepCopy()
			own.Spec.IngressClassName = new("fairlead")
			two.Spec.IngressClassName, young.CreationTimestamp = new("nginx"), metav1.NewTime(now)
			served.Status.LoadBalancer.Ingress = []networkingv1.IngressLoadBalancerIngress{{IP: "192.0.2.1"}}
			written, annotated := *one.DeepCopy(), *one.DeepCopy()
			written.Name, written.Spec.IngressClassName = "written", new("for-nginx")
			annotated.Name, annotated.Annotations = "annotated", map[string]string{"kubernetes.io/ingress.class": "for-nginx"}
			r.judgeIngresses([]networkingv1.Ingress{one, two, own, served, young}, nil, now)
			classes := make([]networkingv1.IngressClass, 2)
			classes[0].Name, classes[0].Spec.Controller = "for-nginx", names.NginxController
			classes[1].Name, classes[1].Spec.Controller = "nginx", "k8s.io/ingress-nginx"
			single := *written.DeepCopy()
			single.Name, single.Annotations = "single", map[string]string{"fairlead.dev/front": "own"}
			r.judgeIngresses([]networkingv1.Ingress{two, written, annotated, single}, classes, now)
		}, []string{
			"ingress default/one has no class, and no controller serves it: set spec.ingressClassName",
			"ingress default/one: no controller of class nginx has given it an address; fairlead serves the class fairlead",
			"ingress default/one has no address: look at service kube-system/fairlead-ingress and at the Events of the Ingress",
			"ingress default/one: no controller of class nginx has given it an address; fairlead serves the class for-nginx",
			"ingress default/written has no address: look at service kube-system/fairlead-ingress and at the Events of the Ingress",
			"ingress default/annotated has no address: look at service kube-system/fairlead-ingress and at the Events of the Ingress",
			"ingress default/single has no address: look at service default/single-fairlead-ingress and at the Events of the Ingress",
		}},
		"limits": {func(r *Report) {
			p := running("a")
			p.Spec.NodeName, p.Spec.Containers[0].Resources.Limits = "n1", corev1.ResourceList{"cpu": {}}
			nodes := []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, {ObjectMeta: metav1.ObjectMeta{Name: "n2"}}}
			for i := range nodes {
				unlimited := corev1.NodeCondition{Type: svc.PodsLimited, Status: corev1.ConditionFalse, Message: "no control groups"}
				nodes[i].Status.Conditions = []corev1.NodeCondition{unlimited}
			}
			r.judgeLimits(nodes, []corev1.Pod{p})
		}, []string{"node n1 does not enforce the limits of 1 Pods: no control groups"}},
		"rejected ports": {func(r *Report) {
			r.Nodes = []nodeReport{{Name: "n1", Ready: true, Programmed: &proxy.Status{Programmed: true, LastError: "port 80 is taken"}}}
			r.judgeNodes([]corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}})
		}, []string{"node n1: some ports are not programmed: port 80 is taken"}},
		"Pods of one owner": {func(r *Report) {
			var all []corev1.Pod
			for _, name := range []string{"web-1-a", "web-1-b", "web-1-c"} {
				p := running(name)
				p.Labels[appsv1.DefaultDeploymentUniqueLabelKey] = "1"
				p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web-1", Controller: new(true)}}
				p.Status.ContainerStatuses[0].State = corev1.ContainerState{
					Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off of " + name},
				}
				all = append(all, p)
			}
			r.judgePods(all, now)
		}, []string{"deployment default/web: 3 Pods alike; the first, pod default/web-1-a: CrashLoopBackOff: back-off of web-1-a"}},
	} {
		r := &Report{Nodes: []nodeReport{{Name: "n1", Ready: true}, {Name: "n2", Ready: true}}}
		c.judge(r)
		if !slices.Equal(r.Problems, c.want) {
			t.Errorf("%s:\ngot  %q\nwant %q", name, r.Problems, c.want)
		}
	}
}

// Where an Event knows the cause, it is the one that is named.
func TestStatusNamesTheCauseOfAnEvent(t *testing.T) {
	now := time.Now()
	event := func(kind, namespace, name, message string, age time.Duration) corev1.Event {
		return corev1.Event{
			Type: corev1.EventTypeWarning, Reason: "Reason", Message: message, LastTimestamp: metav1.NewTime(now.Add(-age)),
			InvolvedObject: corev1.ObjectReference{Kind: kind, Namespace: namespace, Name: name, UID: "1"},
		}
	}
	pending, tls := service("pending", intstr.IntOrString{}, "app=web"), service("tls", intstr.IntOrString{}, "app=web")
	pending.Spec.Type = corev1.ServiceTypeLoadBalancer
	again := service("again", intstr.IntOrString{}, "app=web")
	pending.UID, tls.UID, again.UID = "1", "1", "2"
	services := []corev1.Service{pending, tls, again}
	newest := warnings{}
	newest.add([]corev1.Event{
		event("Service", "default", "pending", "no address is left in pool a", time.Hour),
		event("Service", "default", "pending", "older", 2*time.Hour),
		event("Service", "default", "tls", "the certificate has ended", time.Minute),
		event("Service", "default", "again", "about an earlier Service of this name", time.Minute),
		event("Node", "", "dead", "its machine does not answer other nodes", time.Minute),
	})
	r := &Report{Nodes: []nodeReport{{Name: "dead"}}, Services: serviceReports(services, nil), warnings: newest}
	node := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "dead"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
		{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, LastTransitionTime: metav1.NewTime(now)},
	}}}
	r.judgeNodes([]corev1.Node{node})
	r.judgeServices(services, newPodIndex(nil, false))
	r.judgeWarnings(services, r.warnings, now)
	got := strings.Join(r.Problems, "\n")
	for _, want := range []string{
		"node dead is not Ready: its machine does not answer other nodes",
		"service default/pending has no load balancer address: no address is left in pool a",
		"service default/tls: Reason: the certificate has ended (1m0s ago)",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	for _, lacks := range []string{"older", "about an earlier", "pending: Reason"} {
		if strings.Contains(got, lacks) {
			t.Errorf("%q in\n%s", lacks, got)
		}
	}
}

// A namespace, or a Service of one, limits what is shown.
func TestStatusOfAService(t *testing.T) {
	web, api := service("web", intstr.FromInt32(9376), "app=web"), service("api", intstr.FromInt32(9376), "app=api")
	other := service("web", intstr.FromInt32(9376), "app=web")
	other.Namespace = "other"
	all := []corev1.Service{web, api, other}
	count := func(c scope) int {
		out, err := c.services(all)
		if err != nil {
			t.Error(err)
		}
		return len(out)
	}
	if a, b, c := count(scope{}), count(scope{namespace: "default"}), count(scope{"default", "web"}); a != 3 || b != 2 || c != 1 {
		t.Errorf("%d, %d and %d Services, want 3, 2 and 1", a, b, c)
	}
	_, err := scope{"default", "wbe"}.services(all)
	if err == nil || !strings.Contains(err.Error(), "there is no service wbe in namespace default; there are: web, api; did you mean web?") {
		t.Errorf("a Service that does not exist: %v", err)
	}
	pods := []corev1.Pod{labelled("a", "app=web"), labelled("b", "app=api")}
	if got := (scope{"default", "web"}).pods(pods, all[:1]); len(got) != 1 || got[0].Name != "a" {
		t.Errorf("the Service has the Pods %v", got)
	}
	r := &Report{scope: scope{"default", "web"}}
	one := []discoveryv1.EndpointSlice{sliceOf("web", endpoint("a", "n1", false))}
	r.Endpoints = endpointReports(&web, one, newPodIndex(pods, true), time.Now())
	var out strings.Builder
	if err := r.print(&out); err != nil || !strings.Contains(out.String(), "10.0.0.1   a     n1     no      no node has taken it") {
		t.Errorf("%v:\n%s", err, out.String())
	}
}

// Servers that do not answer are named, and a lost quorum is.
func TestStatusNamesServers(t *testing.T) {
	up, lost := &members.Status{Leader: "1"}, &members.Status{}
	of := func(states ...*members.Status) (list []members.Member) {
		for i, s := range states {
			list = append(list, members.Member{Name: string(rune('a' + i)), Role: members.RoleVoter, Status: s})
		}
		return append(list, members.Member{Name: "new", Role: members.RoleLearner})
	}
	for name, c := range map[string]struct {
		list   []members.Member
		quorum bool
		want   string
	}{
		"one server":  {nil, true, ""},
		"all answer":  {of(up, up, up), true, ""},
		"one is gone": {of(up, nil, up), true, "server b does not answer: 2 of 3 do, and nothing is written when fewer than 2 do"},
		"two are gone": {of(lost, nil, nil), false, "no quorum: 1 of 3 servers answer, 2 have to: nothing can be read or written; " +
			"start b, c again, or see docs/reliability.md for servers that are lost"},
		"no leader": {of(lost, lost, lost), false, "the servers have no leader: 3 of 3 answer; look at the network between them"},
	} {
		r := &Report{}
		if quorum := r.judgeMembers(c.list, func() bool { return false }); quorum != c.quorum || strings.Join(r.Problems, "\n") != c.want {
			t.Errorf("%s: %v, %q; want %v, %q", name, quorum, r.Problems, c.quorum, c.want)
		}
	}
}

// A machine that reaches one of three servers believes its check of the quorum.
func TestStatusBehindOneAddress(t *testing.T) {
	t.Parallel()
	status := http.StatusOK
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/readyz/etcd-quorum" {
			status = http.StatusNotFound
		}
		w.WriteHeader(status)
	}))
	defer s.Close()
	client := kubernetes.NewForConfigOrDie(&rest.Config{Host: s.URL})
	list := []members.Member{{Name: "a", Status: &members.Status{Leader: "1"}}, {Name: "b"}, {Name: "c"}}
	for _, c := range []struct {
		status int
		quorum bool
		want   string
	}{
		{http.StatusOK, true, "some servers could not be asked from this machine, but they have a quorum: b, c"},
		{http.StatusInternalServerError, false, "no quorum: 1 of 3 servers answer"},
	} {
		status = c.status
		r := &Report{}
		quorum := r.judgeMembers(list, func() bool { return hasQuorum(t.Context(), client) })
		if quorum != c.quorum || len(r.Problems) != 1 || !strings.HasPrefix(r.Problems[0], c.want) {
			t.Errorf("%d: %v, %q; want %v, %q", c.status, quorum, r.Problems, c.quorum, c.want)
		}
	}
}

// Certificates that should have been renewed, and an authority that ends, are named; others are not.
func TestStatusNamesCertificates(t *testing.T) {
	now := time.Now()
	day := 24 * time.Hour
	file := func(name string, left, life time.Duration) pki.File {
		return pki.File{Name: name, Subject: "CN=" + name, Begins: now.Add(left - life), Ends: now.Add(left)}
	}
	held := func(holder string, left time.Duration) certs.Held {
		return certs.Held{Holder: holder, Report: pki.Report{Ends: now.Add(left)}}
	}
	r := &Report{}
	r.judgeCertificates(&certs.Status{
		Server: "a", Authorities: []pki.File{file("ca", 3650*day, 3650*day), file("old", day, 3650*day)},
		Certificates: []pki.File{file("server", 25*day, 365*day), file("short", 30*time.Minute, time.Hour)},
		Others:       []certs.Held{held("node n1", 20*day), {Holder: "node n2"}},
	}, now)
	if len(r.Problems) > 0 {
		t.Errorf("all is well: %q", r.Problems)
	}
	r.judgeCertificates(&certs.Status{
		Server: "a", Authorities: []pki.File{file("ca", 80*day, 3650*day)},
		Certificates: []pki.File{file("server", 10*day, 365*day), file("short", 5*time.Minute, time.Hour), file("etcd", -2*time.Hour, 365*day)},
		Others:       []certs.Held{held("node n1", 10*day)},
	}, now)
	want := []string{
		"the cluster's authority CN=ca ends in 80 days: replace it with 'fairlead certs rotate-ca'",
		"certificate server of server a ends in 10 days and was not renewed: see its log, and 'fairlead certs renew server'",
		"certificate short of server a ends in 5m0s and was not renewed: see its log, and 'fairlead certs renew short'",
		"certificate etcd of server a ended 2h0m0s ago and was not renewed: see its log, and 'fairlead certs renew etcd'",
		"the certificate of node n1 ends in 10 days and was not renewed: see the log there",
	}
	if !slices.Equal(r.Problems, want) {
		t.Errorf("%q, want %q", r.Problems, want)
	}
}

// A kubelet, which has no such path, and a node that the user may not ask are no problem; an agent that fails is one.
func TestStatusOfNodesWithoutAgent(t *testing.T) {
	codes := map[string]int{"kubelet": http.StatusNotFound, "secret": http.StatusForbidden, "broken": http.StatusBadGateway}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		node, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/api/v1/nodes/"), "/")
		w.WriteHeader(codes[node])
	}))
	defer server.Close()
	r := &Report{Nodes: []nodeReport{{Name: "kubelet", Ready: true}, {Name: "secret", Ready: true}, {Name: "broken", Ready: true}}}
	r.ask(t.Context(), kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL}))
	if len(r.Problems) != 1 || !strings.HasPrefix(r.Problems[0], "node broken: its agent does not answer: ") {
		t.Errorf("problems: %q", r.Problems)
	}
	if !r.Nodes[0].NoAgent || r.Nodes[1].NoAgent || r.Nodes[2].NoAgent || r.NotAllowed != 1 {
		t.Errorf("%+v, %d not allowed", r.Nodes, r.NotAllowed)
	}
	var out strings.Builder
	if err := r.print(&out); err != nil || strings.Count(out.String(), "no agent of fairlead") != 1 ||
		!strings.Contains(out.String(), "1 nodes were not asked: it takes the right to get nodes/proxy") {
		t.Errorf("%v\n%s", err, &out)
	}
}

// The newest Warning counts, also when it is not on the first page.
func TestWarningsOfAllPages(t *testing.T) {
	now := time.Now()
	page := func(message string, age time.Duration) corev1.EventList {
		return corev1.EventList{Items: []corev1.Event{{
			Type: corev1.EventTypeWarning, Message: message, LastTimestamp: metav1.NewTime(now.Add(-age)),
			InvolvedObject: corev1.ObjectReference{Kind: "Service", Namespace: "default", Name: "web"},
		}}}
	}
	first, second := page("older", time.Hour), page("newer", time.Minute)
	first.Continue = "more"
	client := fake.NewClientset()
	client.PrependReactor("list", "events", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if a.(clienttesting.ListActionImpl).ListOptions.Continue == "more" {
			return true, &second, nil
		}
		return true, &first, nil
	})
	got := readWarnings(t.Context(), client, "")
	if e := got[[3]string{"Service", "default", "web"}]; len(got) != 1 || e.Message != "newer" {
		t.Errorf("the newest Warning is %v", e)
	}
}

// 'fairlead status --watch' goes on when a request fails, and tells it.
func TestWatchGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		var out, errs strings.Builder
		shown := 0
		again(ctx, &out, &errs, func(context.Context) error {
			switch shown++; shown {
			case 1:
				return errors.New("connection refused")
			case 3:
				end()
			}
			return nil
		})
		if shown != 3 || strings.Count(errs.String(), "connection refused; trying again") != 1 {
			t.Errorf("shown %d times, told %q", shown, errs.String())
		}
	})
}

// A pool whose addresses no node can announce is a problem, with the remedy of its condition.
func TestPoolsThatNoNodeAnnounces(t *testing.T) {
	pool := func(name string, status metav1.ConditionStatus) lbv1.IPAddressPool {
		c := metav1.Condition{Type: lbv1.PoolAnnounceable, Status: status, Message: "no node can announce 192.0.2.1: do this"}
		return lbv1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: name},
			Status: lbv1.IPAddressPoolStatus{Conditions: []metav1.Condition{c}}}
	}
	pools := []lbv1.IPAddressPool{pool("bad", metav1.ConditionFalse), pool("good", metav1.ConditionTrue)}
	r := &Report{LoadBalancers: summaryOf(pools, nil)}
	r.judgePools()
	if want := []string{"pool bad: no node can announce 192.0.2.1: do this"}; !slices.Equal(r.Problems, want) {
		t.Errorf("problems %q, want %q", r.Problems, want)
	}
}
