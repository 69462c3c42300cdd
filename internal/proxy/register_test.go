package proxy

import (
	"errors"
	"net/netip"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
)

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

func TestRegistration(t *testing.T) {
	var notReady error
	register := func(o *Options) {
		o.Register = &Registration{
			Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("fd00::1")},
			Labels:    map[string]string{corev1.LabelTopologyZone: "z"}, Annotations: map[string]string{"fairlead.dev/serving-cert-sha256": "abcd"},
			Port: 10250, Info: corev1.NodeSystemInfo{KubeletVersion: "v1", OperatingSystem: "linux", Architecture: "amd64"},
			Ready: func() error { return notReady },
		}
	}
	inBubble(t, register, func(w *world) {
		w.settle(time.Second)
		n := w.own()
		if len(n.Status.Addresses) != 3 || n.Status.Addresses[1] != (corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "fd00::1"}) ||
			n.Status.Addresses[2] != (corev1.NodeAddress{Type: corev1.NodeHostName, Address: "here"}) {
			t.Errorf("addresses %v", n.Status.Addresses)
		}
		if n.Labels[corev1.LabelHostname] != "here" || n.Labels[corev1.LabelTopologyZone] != "z" || n.Labels[corev1.LabelOSStable] != "linux" ||
			n.Annotations["fairlead.dev/serving-cert-sha256"] != "abcd" || n.Status.DaemonEndpoints.KubeletEndpoint.Port != 10250 ||
			n.Status.Allocatable.Pods().Value() != 110 || n.Status.NodeInfo.KubeletVersion != "v1" {
			t.Errorf("node %+v", n)
		}
		if c := condition(n, corev1.NodeReady); c.Status != corev1.ConditionTrue {
			t.Errorf("Ready %+v", c)
		}
		if c := condition(n, ServicesProgrammed); c.Status != corev1.ConditionTrue || c.Reason != "Programmed" || c.Message != "mode fake" {
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

		// The control plane thought it dead: it says otherwise at once.
		n = w.own()
		since := condition(n, ServicesProgrammed).LastTransitionTime
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
		if c := condition(n, ServicesProgrammed); !c.LastTransitionTime.Equal(&since) {
			t.Errorf("a condition that stayed has a new transition time: %v, want %v", c.LastTransitionTime, since)
		}

		// Somebody deleted the Node: it comes back.
		if err := w.client.CoreV1().Nodes().Delete(t.Context(), "here", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.settle(time.Second)
		if c := condition(w.own(), corev1.NodeReady); c.Status != corev1.ConditionTrue {
			t.Errorf("Ready after deletion: %+v", c)
		}

		// What is wrong shows in the conditions.
		notReady = errors.New("no bridge")
		w.plane.set(func(p *fakePlane) { p.fail = func() error { return errors.New("no memory\nno space") } })
		w.setService(service("a", 1))
		w.settle(20 * time.Second)
		n = w.own()
		if c := condition(n, corev1.NodeReady); c.Status != corev1.ConditionFalse || c.Message != "no bridge" {
			t.Errorf("Ready %+v", c)
		}
		if c := condition(n, ServicesProgrammed); c.Status != corev1.ConditionFalse || c.Reason != "ProgrammingFailed" || c.Message != "no memory (and 1 more)" {
			t.Errorf("ServicesProgrammed %+v", c)
		}
	})
}

// A status that the server refuses does not make the machine look dead.
func TestLeaseIsRenewedThoughTheStatusIsRefused(t *testing.T) {
	register := func(o *Options) {
		o.Register = &Registration{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	}
	inBubble(t, register, func(w *world) {
		w.settle(time.Second)
		w.client.PrependReactor("update", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
			return a.GetSubresource() == "status", nil, errors.New("refused")
		})
		w.plane.set(func(p *fakePlane) { p.fail = func() error { return errors.New("no memory") } })
		w.setService(service("a", 1))
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

func TestDropInWritesNoNode(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		w.settle(time.Minute)
		for _, a := range w.client.Actions() {
			if r := a.GetResource().Resource; a.GetVerb() != "list" && a.GetVerb() != "watch" {
				t.Errorf("without registration: %s %s", a.GetVerb(), r)
			}
		}
		synctest.Wait()
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
