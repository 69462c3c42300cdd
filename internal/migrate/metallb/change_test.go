package metallb_test

import (
	"encoding/json"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
	"github.com/fairlead/fairlead/internal/svc"
)

// From every phase both ways lead to their end, in both ways to announce. MetalLB's speakers end only when fairlead lb announces, and
// fairlead lb only when MetalLB is ready; by BGP, when its nodes have their sessions back.
func TestStepsLeadOnFromEveryPhase(t *testing.T) {
	for _, bgp := range []bool{false, true} {
		for _, start := range []metallb.Phase{metallb.Before, metallb.Beside, metallb.Both, metallb.After, metallb.Returning} {
			for _, back := range []bool{false, true} {
				leadOn(t, start, back, bgp)
			}
		}
	}
}

func leadOn(t *testing.T, start metallb.Phase, back, bgp bool) {
	t.Helper()
	want, at, done := metallb.After, start, map[metallb.Action]bool{}
	if back {
		want = metallb.Before
	}
	for n, before := 0, metallb.Phase("x"); at != before; n++ {
		if n > 5 {
			t.Fatalf("from %s, back %t: the way does not end", start, back)
		}
		before = at
		for _, s := range metallb.Steps(at, back, bgp) {
			switch {
			case s.Action == metallb.Remove && !done[metallb.AwaitMetalLB],
				s.Action == metallb.Remove && !bgp && !done[metallb.Settle],
				s.Action == metallb.Remove && bgp && !(done[metallb.ReturnNodes] && done[metallb.RenewPods]):
				t.Errorf("from %s, BGP %t: fairlead lb ends before MetalLB announces", start, bgp)
			case s.Action == metallb.MoveNodes && !(done[metallb.Install] && done[metallb.ApplyPools] && done[metallb.ApplyPeers]):
				t.Errorf("from %s: MetalLB's sessions end before fairlead lb can begin its own", start)
			case s.Action == metallb.Enter && s.Phase == metallb.After && !done[metallb.AwaitAnnounced],
				s.Action == metallb.Enter && s.Phase == metallb.After && bgp && !done[metallb.MoveNodes]:
				t.Errorf("from %s, BGP %t: MetalLB's speakers end before fairlead lb announces", start, bgp)
			}
			if done[s.Action] = true; s.Action == metallb.Enter {
				at = s.Phase
			}
		}
	}
	if at != want {
		t.Errorf("from %s, back %t, BGP %t: the way ends at %s", start, back, bgp, at)
	}
}

// decided is a plan of a cluster that can be changed, whose controller has two Pods.
func decided(t *testing.T) *metallb.Plan {
	t.Helper()
	in := &metallb.Cluster{Objects: []byte(pool() + l2()), Services: []*corev1.Service{service("a", "192.0.2.10", "")}}
	in.Speaker = &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "metallb-system", Name: "speaker"}}
	spec := &in.Speaker.Spec.Template.Spec
	spec.NodeSelector = map[string]string{"kubernetes.io/os": "linux"}
	spec.Tolerations = []corev1.Toleration{{Key: "edge", Operator: corev1.TolerationOpExists}}
	spec.Containers = []corev1.Container{{Image: "speaker:1"}}
	in.Speaker.Status.DesiredNumberScheduled, in.Speaker.Status.NumberReady = 1, 1
	in.Controller = &appsv1.Deployment{Spec: appsv1.DeploymentSpec{Replicas: new(int32(2))}}
	p := metallb.Decide(in)
	if len(p.Refused) > 0 {
		t.Fatal(p.Refused)
	}
	return p
}

func enter(t *testing.T, p *metallb.Plan, d *appsv1.DaemonSet, to metallb.Phase) *appsv1.DaemonSet {
	t.Helper()
	out, err := p.Enter(d, to)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// The DaemonSet of the speakers selects no node in the phase "fairlead" only, and is the same again at the end.
func TestEnter(t *testing.T) {
	p := decided(t)
	before, _ := json.Marshal(p.Speaker())
	d := p.Speaker()
	d.Annotations = map[string]string{}
	for _, phase := range []metallb.Phase{metallb.Beside, metallb.Both, metallb.After, metallb.Returning} {
		d = enter(t, p, d, phase)
		d.Annotations[metallb.Failure] = "x"
		if off := len(d.Spec.Template.Spec.NodeSelector) > 1; off != (phase == metallb.After) || d.Annotations[metallb.Replicas] != "2" {
			t.Errorf("in phase %s: %v, %v", phase, d.Spec.Template.Spec.NodeSelector, d.Annotations)
		}
		if ours := p.Ours(&appsv1.DaemonSet{Spec: appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Image: "fairlead:1"}}},
		}}}, "fairlead:2"); len(ours.Spec.Template.Spec.NodeSelector) != 1 || len(ours.Spec.Template.Spec.Tolerations) != 1 ||
			ours.Spec.Template.Spec.Containers[0].Image != "fairlead:2" {
			t.Errorf("fairlead's DaemonSet is %+v", ours.Spec.Template.Spec)
		}
	}
	if after, _ := json.Marshal(enter(t, p, d, metallb.Before)); string(after) != string(before) {
		t.Errorf("is %s, was %s", after, before)
	}
}

// An address must stay a Service's and be announced, unless no node may announce it or the Service is gone.
func TestUnannounced(t *testing.T) {
	p := decided(t)
	here := func(addresses ...string) *v1.Speaker {
		s := &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: "node1"}, Status: v1.SpeakerStatus{Eligible: true}}
		for _, a := range addresses {
			s.Status.Addresses = append(s.Status.Addresses, v1.AnnouncedAddress{Address: a})
		}
		s.Status.AddressCount = int32(len(addresses))
		return s
	}
	off := here()
	off.Status.Eligible, off.Status.Reason = false, "its proxy is not healthy"
	full := here()
	full.Status.AddressCount = 2000
	local := service("a", "192.0.2.10", "")
	local.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	internal := service("a", "192.0.2.10", "")
	internal.Spec.Type = corev1.ServiceTypeClusterIP
	for _, c := range []struct {
		name     string
		service  *corev1.Service
		speaker  *v1.Speaker
		endpoint bool
		want     string // a part of the error
	}{
		{"announced", service("a", "192.0.2.10", ""), here("192.0.2.9", "192.0.2.10"), false, ""},
		{"another one is", service("a", "192.0.2.10", ""), here("192.0.2.9"), false, "no node announces the address 192.0.2.10"},
		{"none may", service("a", "192.0.2.10", ""), off, false, "node node1: its proxy is not healthy"},
		{"no speaker", service("a", "192.0.2.10", ""), nil, false, "there is no Speaker"},
		{"another address", service("a", "192.0.2.11", ""), here("192.0.2.10"), false, "no longer has the address 192.0.2.10"},
		{"gone", service("b", "192.0.2.11", ""), nil, false, ""},
		{"no load balancer any more", internal, nil, false, ""},
		{"more addresses than a Speaker shows", service("a", "192.0.2.10", ""), full, false, ""},
		{"local without endpoints", local, here(), false, ""},
		{"local with endpoints", local, here(), true, "no node announces"},
	} {
		var speakers []*v1.Speaker
		if c.speaker != nil {
			speakers = append(speakers, c.speaker)
		}
		err := metallb.Unannounced(p.Given(), []*corev1.Service{c.service}, speakers, func(svc.Name) bool { return c.endpoint })
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// MetalLB's pools have the mark of the migration.
func TestPools(t *testing.T) {
	pools := decided(t).Pools()
	if len(pools) != 1 || pools[0].Name != "a" || pools[0].Labels[metallb.PoolLabel] == "" || len(pools[0].Spec.Addresses) != 2 {
		t.Errorf("%+v", pools)
	}
}
