package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
)

// upstream is a test's kube-apiserver and the programs that work on it.
type upstream struct {
	testing.TB
	*upstreamAPI
	ctx      context.Context
	dir      string
	fairlead string
	peers    string
	started  int
}

// newUpstream starts a real kube-apiserver. The test is skipped where it has not
// been built.
func newUpstream(t *testing.T) *upstream {
	t.Helper()
	if testing.Short() {
		t.Skip("starts etcd and kube-apiserver")
	}
	peers, err := filepath.Abs("bin")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager"} {
		if _, err := os.Stat(filepath.Join(peers, name)); err != nil {
			t.Skipf("%v; make -C bench peers builds it", err)
		}
	}
	u := &upstream{TB: t, ctx: t.Context(), dir: t.TempDir(), peers: peers}
	if u.upstreamAPI, err = startKubernetes(u.ctx, u.dir, peers); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.must(u.upstreamAPI.stop()) })
	u.fairlead = filepath.Join(os.Getenv("FAIRLEAD_BIN"), "fairlead")
	if os.Getenv("FAIRLEAD_BIN") == "" {
		u.fairlead = filepath.Join(t.TempDir(), "fairlead")
		build(u.ctx, t, "..", u.fairlead, "./cmd/fairlead")
	}
	return u
}

func (u *upstream) must(err error) {
	u.Helper()
	if err != nil {
		u.Fatal(err)
	}
}

// eventually tries again until f is content.
func (u *upstream) eventually(what string, f func() error) {
	u.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); ; <-tick.C {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			u.Fatalf("%s: after a minute still: %v", what, err)
		}
	}
}

// run starts a program that ends with the test at the latest.
func (u *upstream) run(program string, args ...string) *process {
	u.Helper()
	u.started++
	p, err := spawn(nil, u.dir, fmt.Sprintf("%s-%d", filepath.Base(program), u.started), program, args...)
	u.must(err)
	u.Cleanup(func() {
		_ = p.stop()
		if u.Failed() {
			text, _ := os.ReadFile(p.log)
			u.Logf("%s:\n%s", p.log, text)
		}
	})
	return p
}

// fairleadControllers starts them with the rights that docs/controllers.md gives
// them, and no more.
func (u *upstream) fairleadControllers() *process {
	u.Helper()
	cfg, err := clientcmd.LoadFromFile(u.kubeconfig)
	u.must(err)
	for _, user := range cfg.AuthInfos {
		user.Impersonate = "fairlead-controllers"
	}
	path := filepath.Join(u.dir, "controllers.kubeconfig")
	u.must(clientcmd.WriteToFile(*cfg, path))
	return u.run(u.fairlead, "controllers", "--kubeconfig", path, "--controllers=endpoints,endpointslice,endpointslicemirroring")
}

// applyDocumentedRights creates the objects of the manifest in
// docs/controllers.md.
func (u *upstream) applyDocumentedRights() {
	u.Helper()
	text, err := os.ReadFile(filepath.Join("..", "docs", "controllers.md"))
	u.must(err)
	_, rest, _ := strings.Cut(string(text), "```yaml\n")
	manifest, _, _ := strings.Cut(rest, "```")
	for doc := range strings.SplitSeq(manifest, "---\n") {
		o, _, err := scheme.Codecs.UniversalDeserializer().Decode([]byte(doc), nil, nil)
		u.must(err)
		switch o := o.(type) {
		case *rbacv1.ClusterRole:
			_, err = u.client.RbacV1().ClusterRoles().Create(u.ctx, o, metav1.CreateOptions{})
		case *rbacv1.ClusterRoleBinding:
			_, err = u.client.RbacV1().ClusterRoleBindings().Create(u.ctx, o, metav1.CreateOptions{})
		default:
			err = fmt.Errorf("docs/controllers.md has a %T", o)
		}
		u.must(err)
	}
}

func (u *upstream) service(name string, change ...func(*corev1.Service)) {
	u.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"made": "by-test"}}}
	s.Spec.Selector = map[string]string{"app": name}
	s.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromString("http")}}
	for _, f := range change {
		f(s)
	}
	_, err := u.client.CoreV1().Services("default").Create(u.ctx, s, metav1.CreateOptions{})
	u.must(err)
}

// pod makes a Pod with the given addresses and readiness.
func (u *upstream) pod(name, app string, ready bool, ips ...string) {
	u.Helper()
	grace := int64(3600)
	pod, err := u.client.CoreV1().Pods("default").Create(u.ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": app}},
		Spec: corev1.PodSpec{
			NodeName: podNode, Hostname: name, Subdomain: app, TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{Name: "main", Image: "host", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}},
		},
	}, metav1.CreateOptions{})
	u.must(err)
	pod.Status.Phase, pod.Status.Conditions, pod.Status.PodIP = corev1.PodRunning, readiness(ready), ips[0]
	for _, ip := range ips {
		pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	_, err = u.client.CoreV1().Pods("default").UpdateStatus(u.ctx, pod, metav1.UpdateOptions{})
	u.must(err)
}

// finish gives a Pod its last phase.
func (u *upstream) finish(name string, phase corev1.PodPhase) {
	u.Helper()
	pod, err := u.client.CoreV1().Pods("default").Get(u.ctx, name, metav1.GetOptions{})
	u.must(err)
	pod.Status.Phase, pod.Status.Conditions = phase, readiness(false)
	_, err = u.client.CoreV1().Pods("default").UpdateStatus(u.ctx, pod, metav1.UpdateOptions{})
	u.must(err)
}

// wantSlices waits until the slices of a Service say exactly this: a line
// "address:port hostname conditions zone" for each endpoint, sorted.
func (u *upstream) wantSlices(service string, want ...string) {
	u.Helper()
	u.eventually("slices of "+service, func() error {
		list, err := u.client.DiscoveryV1().EndpointSlices("default").List(u.ctx,
			metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service})
		if err != nil {
			return err
		}
		var got []string
		for _, s := range list.Items {
			for _, e := range s.Endpoints {
				for _, p := range s.Ports {
					line := fmt.Sprintf("%s:%d", e.Addresses[0], *p.Port)
					if e.Hostname != nil {
						line += " " + *e.Hostname
					}
					for _, c := range []struct {
						name string
						is   *bool
					}{{"ready", e.Conditions.Ready}, {"serving", e.Conditions.Serving}, {"terminating", e.Conditions.Terminating}} {
						if c.is != nil && *c.is {
							line += " " + c.name
						}
					}
					if e.Zone != nil {
						line += " " + *e.Zone
					}
					got = append(got, line)
				}
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("%q, want %q", got, want)
		}
		return nil
	})
}

// wantEndpoints waits until the Endpoints object of a Service says "ready
// addresses|addresses not ready".
func (u *upstream) wantEndpoints(service, want string) {
	u.Helper()
	u.eventually("Endpoints "+service, func() error {
		e, err := u.client.CoreV1().Endpoints("default").Get(u.ctx, service, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var ready, not []string
		for _, s := range e.Subsets {
			for _, a := range s.Addresses {
				ready = append(ready, a.IP)
			}
			for _, a := range s.NotReadyAddresses {
				not = append(not, a.IP)
			}
		}
		if got := strings.Join(ready, " ") + "|" + strings.Join(not, " "); got != want {
			return fmt.Errorf("%q, want %q", got, want)
		}
		return nil
	})
}

// versions are the resource versions of all slices and Endpoints of the Services
// named.
func (u *upstream) versions(services ...string) map[string]string {
	u.Helper()
	out := map[string]string{}
	list, err := u.client.DiscoveryV1().EndpointSlices("default").List(u.ctx, metav1.ListOptions{})
	u.must(err)
	for _, s := range list.Items {
		if slices.Contains(services, s.Labels[discoveryv1.LabelServiceName]) {
			out["slice "+s.Name] = s.ResourceVersion
		}
	}
	for _, name := range services {
		e, err := u.client.CoreV1().Endpoints("default").Get(u.ctx, name, metav1.GetOptions{})
		u.must(err)
		out["endpoints "+name] = e.ResourceVersion
	}
	return out
}

func (u *upstream) wantEvent(object, reason string) {
	u.Helper()
	u.eventually("event "+reason, func() error {
		list, err := u.client.CoreV1().Events("default").List(u.ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + object})
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(list.Items, func(e corev1.Event) bool { return e.Reason == reason }) {
			return fmt.Errorf("not among %d events", len(list.Items))
		}
		return nil
	})
}

// behaviours 12, 17 to 24, 27 to 29: on a real kube-apiserver `fairlead controllers`
// takes the place of the three controllers of kube-controller-manager, and the
// two take over from each other without a write.
func TestControllersOnKubernetes(t *testing.T) {
	u := newUpstream(t)
	u.applyDocumentedRights()
	_, err := u.client.CoreV1().Nodes().Create(u.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: podNode, Labels: map[string]string{corev1.LabelTopologyZone: "z1"},
	}}, metav1.CreateOptions{})
	u.must(err)
	leader := u.fairleadControllers()
	dual := corev1.IPFamilyPolicyRequireDualStack
	u.service("web", func(s *corev1.Service) { s.Spec.IPFamilyPolicy = &dual })
	u.service("set", func(s *corev1.Service) {
		s.Spec.ClusterIP, s.Spec.PublishNotReadyAddresses = corev1.ClusterIPNone, true
	})
	u.service("db", func(s *corev1.Service) { s.Spec.Selector = nil })
	u.service("typo", func(s *corev1.Service) {
		s.Spec.Selector, s.Spec.Ports[0].TargetPort = map[string]string{"app": "web"}, intstr.FromString("htpp")
	})
	u.pod("a", "web", true, "10.244.0.1", "fd00:10:244::1")
	u.pod("b", "web", false, "10.244.0.2")
	u.pod("c", "web", true, "10.244.0.3")
	u.pod("failed", "web", true, "10.244.0.4")
	u.pod("done", "web", true, "10.244.0.5")
	u.pod("s0", "set", false, "10.244.0.6")
	_, err = u.client.CoreV1().Endpoints("default").Create(u.ctx, &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: "db"},
		Subsets: []corev1.EndpointSubset{{
			Addresses: []corev1.EndpointAddress{{IP: "192.0.2.42"}, {IP: "2001:db8::42"}}, Ports: []corev1.EndpointPort{{Name: "http", Port: 9376}},
		}},
	}, metav1.CreateOptions{})
	u.must(err)
	u.wantSlices("web", "10.244.0.1:8080 a ready serving z1", "10.244.0.2:8080 b z1", "10.244.0.3:8080 c ready serving z1",
		"10.244.0.4:8080 failed ready serving z1", "10.244.0.5:8080 done ready serving z1", "fd00:10:244::1:8080 a ready serving z1")
	u.finish("failed", corev1.PodFailed)
	u.finish("done", corev1.PodSucceeded)
	u.must(u.client.CoreV1().Pods("default").Delete(u.ctx, "c", metav1.DeleteOptions{})) // no node stops it, so it stays
	web := []string{"10.244.0.1:8080 a ready serving z1", "10.244.0.2:8080 b z1", "10.244.0.3:8080 c serving terminating z1",
		"fd00:10:244::1:8080 a ready serving z1"}
	u.wantSlices("web", web...)
	u.wantEndpoints("web", "10.244.0.1|10.244.0.2") // its first family, and nothing that ends
	u.wantSlices("set", "10.244.0.6:8080 s0 ready z1")
	u.wantEndpoints("set", "10.244.0.6|")
	u.wantSlices("db", "192.0.2.42:9376 ready", "2001:db8::42:9376 ready")
	u.wantEvent("typo", "TargetPortNotFound")

	// A second copy waits for the Lease and takes over when the first stops.
	second := u.fairleadControllers()
	u.must(leader.stop())
	u.service("after")
	u.pod("d", "after", true, "10.244.0.7")
	u.wantSlices("after", "10.244.0.7:8080 d ready serving z1")
	u.wantEndpoints("after", "10.244.0.7|")
	u.must(second.stop())

	// What each writes last shows that it has been through everything before.
	all := []string{"web", "set", "db", "after"}
	before := u.versions(all...)
	theirs := u.run(filepath.Join(u.peers, "kube-controller-manager"), "--kubeconfig", u.kubeconfig, "--leader-elect=false",
		"--bind-address", "127.0.0.1", "--secure-port", "0",
		"--controllers", "endpoints-controller,endpointslice-controller,endpointslice-mirroring-controller")
	u.handedOver(theirs, "theirs", before, all)
	u.must(theirs.stop())
	all = append(all, "theirs")
	before = u.versions(all...)
	third := u.fairleadControllers()
	u.handedOver(third, "ours", before, all)
	u.wantSlices("web", web...)
	for _, p := range []*process{leader, second, third} {
		text, err := os.ReadFile(p.log)
		u.must(err)
		if strings.Contains(string(text), "orbidden") {
			t.Errorf("the documented rights are not enough:\n%s", text)
		}
	}
}

// handedOver waits until p keeps the slices, and wants all that was there
// before unchanged.
func (u *upstream) handedOver(p *process, marker string, before map[string]string, services []string) {
	u.Helper()
	u.service(marker)
	ip := fmt.Sprintf("10.244.1.%d", u.started)
	u.pod("pod-of-"+marker, marker, true, ip)
	u.wantSlices(marker, ip+":8080 pod-of-"+marker+" ready serving z1")
	u.wantEndpoints(marker, ip+"|")
	if after := u.versions(services...); !maps.Equal(before, after) {
		u.Errorf("%s changed what was right before:\nbefore %v\nafter  %v", strings.TrimSuffix(filepath.Base(p.log), ".log"), before, after)
	}
}
