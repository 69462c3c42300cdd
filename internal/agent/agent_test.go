package agent

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// world is a Registrar beside a Proxy, on a fake API server and without a
// kernel, in a synctest bubble.
type world struct {
	t        *testing.T
	client   *fake.Clientset
	applyErr atomic.Pointer[error] // of every Apply
}

func (w *world) Apply(context.Context, *table.Table, []table.Key) error {
	if err := w.applyErr.Load(); err != nil {
		return *err
	}
	return nil
}

func (w *world) Dump(context.Context) (string, error) { return "", nil }

func (w *world) Close() error { return nil }

// inBubble runs f beside a Registrar and checks that it ends.
func inBubble(t *testing.T, opts Options, f func(*world), conditions ...func() corev1.NodeCondition) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, client: fake.NewClientset()}
		log := slog.New(slog.NewTextHandler(t.Output(), nil))
		p, err := proxy.New(proxy.Options{
			Client: w.client, NodeName: "here", Dataplane: w, Mode: "fake", Log: log,
			Addresses: func() ([]netip.Addr, error) { return nil, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		opts.Client, opts.NodeName, opts.Log = w.client, "here", log
		opts.Node, opts.Changed = p.Node, p.Changed()
		opts.Conditions = append(conditions, func() corev1.NodeCondition { return p.Status().Condition() })
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		go func() { ended <- p.Run(ctx) }()
		go func() { ended <- New(opts).Run(ctx) }()
		synctest.Wait()
		f(w)
		stop()
		for range cap(ended) {
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(time.Minute):
				t.Fatal("Run does not end")
			}
		}
	})
}

// settle lets d pass, and waits until nothing is left to do but what timers
// will start.
func (w *world) settle(d time.Duration) {
	time.Sleep(d) // of the bubble's clock
	synctest.Wait()
}

// fail makes every Apply return err, the next one at once.
func (w *world) fail(err error) {
	w.t.Helper()
	w.applyErr.Store(&err)
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"},
		Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if _, err := w.client.CoreV1().Services("default").Create(w.t.Context(), s, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) own() *corev1.Node {
	w.t.Helper()
	n, err := w.client.CoreV1().Nodes().Get(w.t.Context(), "here", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

func condition(n *corev1.Node, t corev1.NodeConditionType) corev1.NodeCondition {
	for _, c := range n.Status.Conditions {
		if c.Type == t {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// An agent that restarts does not report its Pods as lost until it has found them; it does not hide for long that they are, nor
// after the machine restarted, nor once it was ready itself.
func TestReadyAcrossRestarts(t *testing.T) {
	down := errors.New("no range yet")
	var notReady error
	start := time.Unix(1_000_000, 0)
	r := New(Options{NodeName: "here", Log: slog.New(slog.DiscardHandler), Info: corev1.NodeSystemInfo{BootID: "1"},
		Ready: func() error { return notReady }})
	expect := func(what string, n *corev1.Node, after time.Duration, want corev1.ConditionStatus) {
		t.Helper()
		if r.fillStatus(n, start.Add(after)); condition(n, corev1.NodeReady).Status != want {
			t.Errorf("%s: Ready is %+v, want %s", what, condition(n, corev1.NodeReady), want)
		}
	}
	restart := func() { r.began, r.known, notReady = start, false, down }
	restart()
	expect("a new node", &corev1.Node{}, 0, corev1.ConditionFalse)
	notReady = nil
	n := &corev1.Node{}
	expect("the first agent", n, 0, corev1.ConditionTrue)
	restart()
	expect("the next agent", n, 3*time.Second, corev1.ConditionTrue)
	expect("for long", n, startHold, corev1.ConditionFalse)
	expect("one that was not Ready", n, time.Second, corev1.ConditionFalse)
	notReady = nil
	expect("ready", n, time.Second, corev1.ConditionTrue)
	notReady = down
	expect("after that", n, 2*time.Second, corev1.ConditionFalse)
	notReady = nil
	expect("ready again", n, 3*time.Second, corev1.ConditionTrue)
	restart()
	n.Status.NodeInfo.BootID = "0"
	expect("the machine restarted", n, time.Second, corev1.ConditionFalse)
}

func TestRegistration(t *testing.T) {
	var notReady error
	inBubble(t, Options{
		Addresses:   []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("fd00::1")},
		Annotations: map[string]string{"fairlead.dev/serving-cert-sha256": "abcd"},
		Port:        10250, Info: corev1.NodeSystemInfo{KubeletVersion: "v1", OperatingSystem: "linux", Architecture: "amd64"},
		Ready: func() error { return notReady }, MaxPods: 500,
	}, func(w *world) {
		w.settle(time.Second)
		n := w.own()
		if len(n.Status.Addresses) != 3 || n.Status.Addresses[1] != (corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "fd00::1"}) ||
			n.Status.Addresses[2] != (corev1.NodeAddress{Type: corev1.NodeHostName, Address: "here"}) {
			t.Errorf("addresses %v", n.Status.Addresses)
		}
		if n.Labels[corev1.LabelHostname] != "here" || n.Labels[corev1.LabelOSStable] != "linux" ||
			n.Annotations["fairlead.dev/serving-cert-sha256"] != "abcd" || n.Status.DaemonEndpoints.KubeletEndpoint.Port != 10250 ||
			n.Status.Allocatable.Pods().Value() != 500 || n.Status.NodeInfo.KubeletVersion != "v1" {
			t.Errorf("node %+v", n)
		}
		if c := condition(n, corev1.NodeReady); c.Status != corev1.ConditionTrue {
			t.Errorf("Ready %+v", c)
		}
		if c := condition(n, svc.ServicesProgrammed); c.Status != corev1.ConditionTrue || c.Reason != "Programmed" || c.Message != "mode fake" {
			t.Errorf("ServicesProgrammed %+v", c)
		}

		lease := func() time.Time {
			l, err := w.client.CoordinationV1().Leases("kube-node-lease").Get(t.Context(), "here", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if *l.Spec.LeaseDurationSeconds != 40 || *l.Spec.HolderIdentity != "here" {
				t.Errorf("lease %+v", l.Spec)
			}
			return l.Spec.RenewTime.Time
		}
		for range 12 {
			if age := time.Since(lease()); age > 11*time.Second {
				t.Errorf("the lease is %s old", age)
			}
			w.settle(5 * time.Second)
		}

		// A quiet node writes its lease and nothing else.
		w.client.ClearActions()
		w.settle(time.Minute)
		for _, a := range w.client.Actions() {
			if a.GetResource().Resource != "leases" {
				t.Errorf("a quiet node: %s %s", a.GetVerb(), a.GetResource().Resource)
			}
		}

		// The control plane took it for dead: it corrects that at once.
		n = w.own()
		since := condition(n, svc.ServicesProgrammed).LastTransitionTime
		for i := range n.Status.Conditions {
			if n.Status.Conditions[i].Type == corev1.NodeReady {
				n.Status.Conditions[i].Status = corev1.ConditionUnknown
			}
		}
		if _, err := w.client.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.settle(time.Second)
		n = w.own()
		if c := condition(n, corev1.NodeReady); c.Status != corev1.ConditionTrue || time.Since(c.LastTransitionTime.Time) > 2*time.Second {
			t.Errorf("Ready after Unknown: %+v", c)
		}
		if c := condition(n, svc.ServicesProgrammed); !c.LastTransitionTime.Equal(&since) {
			t.Errorf("a condition that stayed has a new transition time: %v, want %v", c.LastTransitionTime, since)
		}

		// The Node is deleted by another client: it comes back.
		if err := w.client.CoreV1().Nodes().Delete(t.Context(), "here", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.settle(time.Second)
		if c := condition(w.own(), corev1.NodeReady); c.Status != corev1.ConditionTrue {
			t.Errorf("Ready after deletion: %+v", c)
		}

		// What is wrong shows in the conditions.
		notReady = errors.New("no bridge")
		w.fail(errors.New("no memory\nno space"))
		w.settle(20 * time.Second)
		n = w.own()
		if c := condition(n, corev1.NodeReady); c.Status != corev1.ConditionFalse || c.Message != "no bridge" {
			t.Errorf("Ready %+v", c)
		}
		if c := condition(n, svc.ServicesProgrammed); c.Status != corev1.ConditionFalse || c.Reason != "ProgrammingFailed" ||
			c.Message != "no memory (and 1 more)" {
			t.Errorf("ServicesProgrammed %+v", c)
		}
	})
}

// The scheduler gets no more Pods for a node than its range has addresses: one more would never start.
func TestPodsAreBoundedByAddresses(t *testing.T) {
	inBubble(t, Options{MaxPods: 500}, func(w *world) {
		w.settle(time.Second)
		for _, c := range []struct {
			ranges      []string
			allocatable int64
		}{
			{nil, 500}, {[]string{"10.244.0.0/24", "fd00:10:244::/64"}, 253}, {[]string{"10.244.0.0/22"}, 500},
			{[]string{"fd00:10:244::/64"}, 500}, {[]string{"fd00:10:244::/124"}, 14}, {[]string{"10.244.0.0/31"}, 0}, {[]string{"x"}, 500},
		} {
			n := w.own()
			n.Spec.PodCIDRs = c.ranges
			if _, err := w.client.CoreV1().Nodes().Update(t.Context(), n, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			w.settle(11 * time.Second)
			n = w.own()
			if got := n.Status.Allocatable.Pods().Value(); got != c.allocatable || n.Status.Capacity.Pods().Value() != 500 {
				t.Errorf("%v: %d of %d pods are allocatable, want %d", c.ranges, got, n.Status.Capacity.Pods().Value(), c.allocatable)
			}
		}
	})
}

// A status that the server rejects does not make the machine look dead.
func TestLeaseIsRenewedThoughTheStatusIsRejected(t *testing.T) {
	inBubble(t, Options{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}, func(w *world) {
		w.settle(time.Second)
		w.client.PrependReactor("update", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
			return a.GetSubresource() == "status", nil, errors.New("rejected")
		})
		w.fail(errors.New("no memory"))
		for range 12 {
			w.settle(5 * time.Second)
			l, err := w.client.CoordinationV1().Leases("kube-node-lease").Get(t.Context(), "here", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if age := time.Since(l.Spec.RenewTime.Time); age > 11*time.Second {
				t.Fatalf("the lease is %s old", age)
			}
		}
	})
}

// A public key that the server rejects, as that of another node, holds up nothing else: the Node is created, other annotations
// and the status follow, and a condition has the reason until the key is accepted.
func TestRejectedKeyHoldsUpNothing(t *testing.T) {
	certificates, taken := map[string]string{}, true
	opts := Options{Annotations: map[string]string{svc.PublicKeyAnnotation: "key", "static": "a"}}
	opts.Certificates = func() map[string]string { return maps.Clone(certificates) }
	inBubble(t, opts, func(w *world) {
		reject := func(a clienttesting.Action) (bool, runtime.Object, error) {
			var has bool
			switch a := a.(type) {
			case clienttesting.CreateAction:
				_, has = a.GetObject().(*corev1.Node).Annotations[svc.PublicKeyAnnotation]
			case clienttesting.PatchAction:
				has = strings.Contains(string(a.GetPatch()), svc.PublicKeyAnnotation)
			}
			return has && taken, nil, apierrors.NewInvalid(schema.GroupKind{Kind: "Node"}, "here", nil)
		}
		if err := w.client.CoreV1().Nodes().Delete(t.Context(), "here", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.client.PrependReactor("create", "nodes", reject)
		w.client.PrependReactor("patch", "nodes", reject)
		for _, step := range []struct {
			taken  bool
			report string
			want   corev1.ConditionStatus
		}{{true, "one", corev1.ConditionFalse}, {true, "two", corev1.ConditionFalse}, {false, "three", corev1.ConditionTrue}} {
			taken, certificates["report"] = step.taken, step.report
			w.settle(2 * renewPeriod)
			n := w.own()
			key := n.Annotations[svc.PublicKeyAnnotation]
			at := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == svc.KeyAccepted })
			if n.Annotations["report"] != step.report || n.Annotations["static"] != "a" || (key == "") != step.taken ||
				at < 0 || n.Status.Conditions[at].Status != step.want {
				t.Errorf("key taken %t: annotations %v, conditions %v", step.taken, n.Annotations, n.Status.Conditions)
			}
		}
	})
}

// Labels that were removed come back, and what others have set stays.
func TestForeignMetadataStays(t *testing.T) {
	inBubble(t, Options{Info: corev1.NodeSystemInfo{OperatingSystem: "linux", Architecture: "amd64"}}, func(w *world) {
		w.settle(time.Second)
		n := w.own()
		delete(n.Labels, corev1.LabelHostname)
		n.Labels["zone"], n.Annotations = "z", map[string]string{"by": "others"}
		if _, err := w.client.CoreV1().Nodes().Update(t.Context(), n, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.settle(time.Second)
		n = w.own()
		if n.Labels[corev1.LabelHostname] != "here" || n.Labels["zone"] != "z" || n.Annotations["by"] != "others" {
			t.Errorf("labels %v, annotations %v", n.Labels, n.Annotations)
		}
	})
}

func TestMachineCapacity(t *testing.T) {
	c := MachineCapacity(fstest.MapFS{"proc/meminfo": {Data: []byte("MemTotal:       24689956 kB\nMemFree: 1 kB\n")}})
	if got := c.Memory().Value(); got != 24689956<<10 {
		t.Errorf("memory is %d bytes", got)
	}
	if c.Cpu().Value() < 1 {
		t.Errorf("processors are %s", c.Cpu())
	}
}

func TestMachineInfo(t *testing.T) {
	info := MachineInfo(fstest.MapFS{
		"etc/machine-id":               {Data: []byte("abc\n")},
		"proc/sys/kernel/osrelease":    {Data: []byte("6.1.0\n")},
		"etc/os-release":               {Data: []byte("ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n")},
		"proc/sys/kernel/random/other": {},
	}, "v0.1.0")
	if info.MachineID != "abc" || info.KernelVersion != "6.1.0" || info.OSImage != "Debian GNU/Linux 12" || info.BootID != "" ||
		info.ContainerRuntimeVersion != "fairlead://v0.1.0" || info.KubeletVersion != "v0.1.0" || info.OperatingSystem != "linux" {
		t.Errorf("%+v", info)
	}
}
