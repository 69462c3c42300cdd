package runner_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/testbed"
)

// forgeAsPod sends datagrams from FORGED and then one from an own address to each of TARGETS, both in the order of
// families, until it is ended.
func forgeAsPod() {
	for {
		for i, target := range strings.Fields(os.Getenv("TARGETS")) {
			to := netip.MustParseAddrPort(target)
			forged := netip.MustParseAddr(strings.Fields(os.Getenv("FORGED"))[i%2])
			fmt.Println(target, "forged:", datagram(forged, to), "own:", datagram(netip.Addr{}, to))
		}
		<-time.After(50 * time.Millisecond)
	}
}

// datagram sends one from an address that this network need not have.
func datagram(from netip.Addr, to netip.AddrPort) error {
	family, level, option := unix.AF_INET, unix.SOL_IP, unix.IP_FREEBIND
	var dst, src unix.Sockaddr = &unix.SockaddrInet4{Addr: [4]byte(to.Addr().AsSlice()[:4]), Port: int(to.Port())}, nil
	if from.Is4() {
		src = &unix.SockaddrInet4{Addr: from.As4()}
	}
	if to.Addr().Is6() {
		family, level, option = unix.AF_INET6, unix.SOL_IPV6, unix.IPV6_FREEBIND
		dst = &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
		if from.Is6() {
			src = &unix.SockaddrInet6{Addr: from.As16()}
		}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if src != nil {
		if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
			return err
		}
		if err := unix.Bind(fd, src); err != nil {
			return err
		}
	}
	return unix.Sendto(fd, []byte("x"), 0, dst)
}

// A confined Pod, which needs no right for it, reaches neither another Pod nor the node with an address that is not its
// own, also after a restart of the agent and after another program has removed all rules.
func TestForgedSourcesReachNobody(t *testing.T) {
	armed(t)
	c := newCluster(t, nil)
	c.create(pod("victim", "exec sleep 600"))
	victim := c.until("victim", "running", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
	inside := netns.Of(c.record(victim, 0).Process.Pid)
	var sockets []*net.UDPConn
	var targets []string
	listen := func(ns, at string) {
		t.Helper()
		if err := netns.Do(ns, func() error {
			u, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(at)})
			if err == nil {
				sockets = append(sockets, u)
				targets = append(targets, u.LocalAddr().(*net.UDPAddr).AddrPort().String())
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	listen(inside, victim.Status.PodIPs[0].IP)
	listen(inside, victim.Status.PodIPs[1].IP)
	listen("/proc/self/ns/net", "10.244.1.1")
	listen("/proc/self/ns/net", "fd00:10:244:1::1")
	t.Cleanup(func() {
		for _, u := range sockets {
			_ = u.Close()
		}
	})
	p := pod("forger", "")
	p.Namespace = c.namespace("baseline")
	p.Spec.AutomountServiceAccountToken = new(false)
	p.Spec.Containers[0].Command = []string{"/srv/attack"}
	p.Spec.Containers[0].Env = []corev1.EnvVar{
		{Name: "RUNNER_TEST_SERVE", Value: "forge"}, {Name: "TARGETS", Value: strings.Join(targets, " ")},
		{Name: "FORGED", Value: "10.244.1.200 fd00:10:244:1::200"},
	}
	p = c.create(p)
	pods := c.client.CoreV1().Pods(p.Namespace)
	t.Cleanup(func() { _ = pods.Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}) })
	var own []string
	await(t, "the addresses of the forger", func() bool {
		got, err := pods.Get(t.Context(), p.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, ip := range got.Status.PodIPs {
			own = append(own, ip.IP)
		}
		return len(own) == 2
	})
	// Each socket gets rounds of the forger: after some from an own address, forged ones had their turn.
	check := func(when string) {
		t.Helper()
		for i, u := range sockets {
			for n := 0; n < 3; n++ {
				_ = u.SetReadDeadline(time.Now().Add(testbed.Patience))
				_, from, err := u.ReadFromUDPAddrPort(make([]byte, 10))
				if err != nil {
					t.Fatalf("%s: %s: %v; the forger wrote\n%s", when, targets[i], err, c.logOf(p, 0))
				}
				if !slices.Contains(own, from.Addr().Unmap().String()) {
					t.Errorf("%s: %s got a datagram from %s", when, targets[i], from)
				}
			}
		}
	}
	check("at first")
	if text := c.logOf(p, 0); !strings.Contains(text, "forged: <nil> own: <nil>") {
		t.Errorf("the forger could not even send:\n%s", text)
	}
	drain := func() { // what came before the rules were back
		for _, u := range sockets {
			for err := error(nil); err == nil; {
				_ = u.SetReadDeadline(time.Now().Add(time.Millisecond))
				_, _, err = u.ReadFromUDPAddrPort(make([]byte, 10))
			}
		}
	}
	c.stop()
	c.start()
	check("with the next agent")
	table := func() bool {
		out, err := exec.CommandContext(t.Context(), "nft", "list", "table", "ip6", "fairlead-sources").Output()
		return err == nil && strings.Contains(string(out), own[1])
	}
	run(t, "", "nft", "flush", "ruleset")
	await(t, "the rules that another program has removed", table)
	drain()
	check("after another program has removed all rules")
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(c.r)
	await(t, "the metric", func() bool {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "fairlead_pod_forged_packets_total" && len(f.Metric) == 1 && f.Metric[0].GetCounter().GetValue() > 0 {
				return f.Metric[0].Label[1].GetValue() == "forger"
			}
		}
		return false
	})
	if got := c.r.SourcesChecked(); got.Status != corev1.ConditionTrue {
		t.Errorf("the condition: %+v", got)
	}
	if err := pods.Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}); err != nil {
		t.Error(err)
	}
	await(t, "the end of the forger in the rules", func() bool { return !table() })
}
