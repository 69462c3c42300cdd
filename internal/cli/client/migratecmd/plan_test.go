package migratecmd

import (
	"errors"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/migrate/metallb"
)

// Addresses have a line that is right for one, too.
func TestPrintPlans(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	p := plans{LoadBalancers: &metallb.Plan{MetalLB: "DaemonSet a/b", Addresses: 1, Differs: []string{"a field"},
		KubeVIP: []metallb.KubeVIP{{DaemonSet: "c/d", Image: "kube-vip:1", Settings: []string{"vip_arp"}}}}}
	err := printPlans(&out, p)
	const want = "MetalLB: DaemonSet a/b; phase metallb; addresses of Services that are taken over: 1\n" +
		"differs of load balancers:\n  - a field\n" +
		"kube-vip: DaemonSet c/d, kube-vip:1; the change is by hand: docs/loadbalancer.md, \"From kube-vip\"\n" +
		"settings of kube-vip:\n  - vip_arp\n"
	if err != nil || out.String() != want {
		t.Errorf("%v\n%s\nwant\n%s", err, out.String(), want)
	}
}

// planned has only a plan.
type planned struct {
	walker
	plan *metallb.Plan
}

func (p planned) Plan() *metallb.Plan { return p.plan }

// What 'apply' does not change keeps 'plan' from success only if it is named.
func TestPlanCountsItsComponent(t *testing.T) {
	t.Parallel()
	refused := walks{lb: planned{plan: &metallb.Plan{Refused: []string{"a field"}}}}
	for component, want := range map[string]int{proxyComponent: 0, dnsComponent: 0, lbComponent: 1} {
		if p, got := refused.plans(component); got != want || p.LoadBalancers == nil {
			t.Errorf("%s: %d reasons, want %d", component, got, want)
		}
	}
	lost := errors.New("forbidden")
	var w walks
	if err := (&command{component: lbComponent}).unlooked(&w, lbComponent, lost); !errors.Is(err, lost) {
		t.Errorf("a component that is named: %v", err)
	}
	if err := (&command{}).unlooked(&w, lbComponent, lost); err != nil || len(w.unseen) != 1 || w.unseen[0] != "--component lb: forbidden" {
		t.Errorf("one that is not: %v, %q", err, w.unseen)
	}
}
