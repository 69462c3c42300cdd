package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/preflight"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// Forwarding that another program has switched off is switched on again, and a chain that drops everything is reported.
func TestForwarded(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		sh := func(script string) {
			if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", script, err, out)
			}
		}
		var log bytes.Buffer
		packets := preflight.Packets{Ranges: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}
		f := newForwarded(slog.New(slog.NewTextHandler(&log, nil)), packets)
		again := func() corev1.NodeCondition {
			f.refresh(t.Context())
			return f.condition()
		}
		if c := again(); c.Status != corev1.ConditionTrue || !link.Forwards() {
			t.Errorf("at first: %+v", c)
		}
		sh("sysctl -qw net.ipv4.ip_forward=0")
		if c := again(); c.Status != corev1.ConditionTrue || !link.Forwards() || !strings.Contains(log.String(), "it is on again") {
			t.Errorf("switched off by another program: %+v, log %q", c, log.String())
		}
		sh("iptables-nft -P FORWARD DROP")
		c := again()
		if c.Status != corev1.ConditionFalse || c.Reason != "PolicyDrop" || !strings.Contains(c.Message, "chain FORWARD of table ip filter") ||
			!strings.Contains(log.String(), "packets of Pods are dropped") {
			t.Errorf("a policy that drops: %+v, log %q", c, log.String())
		}
		sh("iptables-nft -P FORWARD ACCEPT")
		if c := again(); c.Status != corev1.ConditionTrue {
			t.Errorf("repaired: %+v", c)
		}
		sh("nft 'add table ip other; " +
			"add chain ip other out { type filter hook output priority 0; }; add rule ip other out ip daddr 10.96.0.10 drop'")
		if c := again(); c.Status != corev1.ConditionFalse || c.Reason != "RuleDrop" ||
			!strings.Contains(c.Message, "chain out of table ip other drops packets to 10.96.0.10/32") {
			t.Errorf("a rule that drops: %+v", c)
		}
	})
}

// The heartbeat asks for the condition before it renews the Lease: it waits for no look.
func TestForwardedDoesNotHoldTheHeartbeat(t *testing.T) {
	h := testbed.NewNetwork(t).Outside("host")
	f := newForwarded(slog.New(slog.DiscardHandler), preflight.Packets{})
	looks, found := make(chan struct{}), make(chan string)
	f.look = func(context.Context) (string, string, error) {
		looks <- struct{}{}
		return "RuleDrop", <-found, nil
	}
	last := f.condition()
	if last.Status != corev1.ConditionUnknown || last.Type != svc.PacketsForwarded {
		t.Errorf("before the first look: %+v", last)
	}
	for _, message := range []string{"a rule drops", "another one drops"} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			h.Do(func() { f.refresh(t.Context()) })
		}()
		<-looks
		asked := make(chan corev1.NodeCondition, 1)
		go func() { asked <- f.condition() }()
		select {
		case c := <-asked:
			if c != last {
				t.Errorf("during a look: %+v, want %+v", c, last)
			}
		case <-time.After(10 * time.Second):
			t.Error("the condition waits for a look")
		}
		found <- message
		<-done
		if last = f.condition(); last.Message != message {
			t.Errorf("after a look: %+v", last)
		}
		select {
		case <-f.changed:
		default:
			t.Error("the change is not reported")
		}
	}
}

// What another program changes is repaired, or named, within a second.
func TestForwardedIsWatched(t *testing.T) {
	h := testbed.NewNetwork(t).Outside("host")
	f := newForwarded(slog.New(slog.DiscardHandler), preflight.Packets{})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.Do(func() { _ = f.run(ctx) })
	}()
	defer func() { stop(); <-ended }()
	sh := func(script string) time.Time {
		if out, err := h.Command(t.Context(), "sh", "-ec", script).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		return time.Now()
	}
	within := func(what string, since time.Time, f func() error) {
		t.Helper()
		testbed.Until(t, what, f)
		took := time.Since(since)
		t.Logf("%s: %v", what, took.Round(time.Millisecond))
		if took > time.Second+2*time.Second { // the rest is for a machine that does other things
			t.Errorf("%s took %v", what, took)
		}
	}
	condition := func(status corev1.ConditionStatus) func() error {
		return func() error {
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.last.Status != status {
				return fmt.Errorf("the condition is %+v", f.last)
			}
			return nil
		}
	}
	testbed.Until(t, "the first look", condition(corev1.ConditionTrue))
	<-f.changed
	forwards := func() (err error) {
		h.Do(func() {
			if !link.Forwards() {
				err = errors.New("the machine does not forward")
			}
		})
		return err
	}
	for _, key := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
		within(key+" is on again", sh("sysctl -qw "+key+"=0"), forwards)
	}
	within("the policy is named", sh("iptables-nft -P FORWARD DROP"), condition(corev1.ConditionFalse))
	<-f.changed
	within("a rule accepts", sh("iptables-nft -A FORWARD -j ACCEPT"), condition(corev1.ConditionTrue))
	within("the rule is gone", sh("iptables-nft -F FORWARD"), condition(corev1.ConditionFalse))
	within("the policy accepts", sh("iptables-nft -P FORWARD ACCEPT"), condition(corev1.ConditionTrue))
	const own = "nft add table inet own; nft 'add chain inet own passing { type filter hook forward priority 0; policy drop; }'"
	within("a chain of another name drops", sh(own), condition(corev1.ConditionFalse))
	within("it is gone", sh("nft delete table inet own"), condition(corev1.ConditionTrue))
}
