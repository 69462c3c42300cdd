package metallb_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
)

// byBGP is a plan of a cluster that announces by BGP from two nodes.
func byBGP(t *testing.T) (*metallb.Plan, *metallb.Sessions) {
	t.Helper()
	in := &metallb.Cluster{Objects: []byte(pool() + bgp("")), Services: []*corev1.Service{service("a", "192.0.2.10", "")}}
	in.Speaker = &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "metallb-system", Name: "speaker"}}
	in.Speaker.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{Type: appsv1.RollingUpdateDaemonSetStrategyType}
	in.Speaker.Spec.Template.Labels = map[string]string{"app": "metallb"}
	in.Speaker.Spec.Template.Spec.Containers = []corev1.Container{{Image: "speaker:1"}}
	in.Speaker.Status.DesiredNumberScheduled, in.Speaker.Status.NumberReady = 2, 2
	in.Controller, in.Sessions = &appsv1.Deployment{}, sessions(in.Services)
	p := metallb.Decide(in)
	if len(p.Refused) > 0 || !p.BGP() {
		t.Fatal(p.Refused, p.BGP())
	}
	return p, in.Sessions
}

// speaking is a Speaker with a session, and an announced address unless it is empty.
func speaking(state, address string) *v1.Speaker {
	s := &v1.Speaker{Status: v1.SpeakerStatus{Eligible: true, Peers: []v1.PeerStatus{{Name: "router", State: state, Reason: "no route"}}}}
	if address != "" {
		s.Status.Addresses = []v1.AnnouncedAddress{{Address: address, Via: "bgp"}}
	}
	return s
}

// A node may give up its sessions only when the other one announces, with whichever program that is.
func TestLast(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(n1, n2 *metallb.Node)
		last   bool
	}{
		{"both with MetalLB", func(_, _ *metallb.Node) {}, false},
		{"the other one is not ready", func(_, n2 *metallb.Node) { n2.Ready = false }, true},
		{"the other one changes", func(_, n2 *metallb.Node) { n2.Labels[metallb.NodeLabel] = metallb.Leaving }, true},
		{"the other one returns", func(_, n2 *metallb.Node) { n2.Labels[metallb.NodeLabel] = metallb.Coming }, true},
		{"the other one has moved", func(_, n2 *metallb.Node) {
			n2.Labels[metallb.NodeLabel], n2.Speaker = metallb.Moved, speaking(v1.PeerEstablished, "192.0.2.10")
		}, false},
		{"the other one has no session", func(_, n2 *metallb.Node) {
			n2.Labels[metallb.NodeLabel], n2.Speaker = metallb.Moved, speaking("Active", "192.0.2.10")
		}, true},
		{"the other one announces something else", func(_, n2 *metallb.Node) {
			n2.Labels[metallb.NodeLabel], n2.Speaker = metallb.Moved, speaking(v1.PeerEstablished, "192.0.2.11")
		}, true},
		{"this one announces nothing", func(n1, n2 *metallb.Node) {
			n1.Labels[metallb.NodeLabel], n1.Speaker = metallb.Moved, speaking("Active", "")
			n2.Ready = false
		}, false},
		{"this one is excluded", func(n1, n2 *metallb.Node) {
			n1.Labels[corev1.LabelNodeExcludeBalancers] = ""
			n2.Ready = false
		}, false},
	} {
		p, s := byBGP(t)
		c.change(&s.Nodes[0], &s.Nodes[1])
		if err := p.Last(s, "n1"); c.last != (err != nil) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// A node has changed when it has its sessions, and announces over them what it has to; and it has changed back when it has none.
func TestEstablished(t *testing.T) {
	p, s := byBGP(t)
	n := &s.Nodes[0]
	for _, c := range []struct {
		name       string
		speaker    *v1.Speaker
		want, left string // a part of the error
	}{
		{"none", nil, "has no Speaker", ""},
		{"no session", speaking("Active", "192.0.2.10"), "no session with BGPPeer router: Active, no route", "still has a session"},
		{"no address", speaking(v1.PeerEstablished, ""), "does not announce the address 192.0.2.10", "still has a session"},
		{"all", speaking(v1.PeerEstablished, "192.0.2.10"), "", "still has a session"},
		{"no peer", &v1.Speaker{}, "no session with BGPPeer router", ""},
	} {
		n.Speaker = c.speaker
		for _, got := range []struct {
			err  error
			want string
		}{{p.Established(s, "n1"), c.want}, {p.Ended(s, "n1"), c.left}} {
			if (got.err == nil) != (got.want == "") || got.err != nil && !strings.Contains(got.err.Error(), got.want) {
				t.Errorf("%s: %v, want %q", c.name, got.err, got.want)
			}
		}
	}
	delete(s.Endpoints, p.Given()[0].Service)
	if n.Speaker = speaking(v1.PeerEstablished, ""); p.Established(s, "n1") != nil {
		t.Errorf("a Service without an endpoint: %v", p.Established(s, "n1"))
	}
	if got := p.Routers(s, "n1"); len(got) != 1 || got[0] != "192.0.2.1:179" {
		t.Errorf("the routers are %v", got)
	}
}

// While nodes change one by one, no change of the speakers' template replaces a Pod, and at the end the DaemonSet is the same again.
func TestHeldSpeakers(t *testing.T) {
	p, _ := byBGP(t)
	before, _ := json.Marshal(p.Speaker())
	d := p.Speaker()
	for _, phase := range []metallb.Phase{metallb.Beside, metallb.Both, metallb.After, metallb.Returning, metallb.Both, metallb.Returning} {
		d = enter(t, p, d, phase)
		held := d.Spec.UpdateStrategy.Type == appsv1.OnDeleteDaemonSetStrategyType
		off := d.Spec.Template.Spec.Affinity != nil && d.Spec.Template.Labels[metallb.HeldLabel] != ""
		if want := phase != metallb.Beside; held != want || off != want {
			t.Errorf("in phase %s: strategy %v, template %v", phase, d.Spec.UpdateStrategy, d.Spec.Template)
		}
	}
	if d = p.Released(d); d.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType || d.Spec.Template.Spec.Affinity != nil {
		t.Errorf("released is %+v", d.Spec)
	}
	if after, _ := json.Marshal(enter(t, p, d, metallb.Before)); string(after) != string(before) {
		t.Errorf("is %s, was %s", after, before)
	}
	lost := enter(t, p, d, metallb.Both)
	lost.Annotations[metallb.Strategy] = "{"
	if out, err := p.Enter(lost, metallb.Before); err == nil || !strings.Contains(err.Error(), metallb.Strategy) {
		t.Errorf("without the strategy: %+v, %v", out, err)
	}
	base := &appsv1.DaemonSet{}
	base.Spec.Template.Spec.Containers = []corev1.Container{{Args: []string{"lb"}}}
	ours := p.Ours(base, "").Spec.Template.Spec
	if ours.Affinity != nil || strings.Join(ours.Containers[0].Args, " ") != "lb --lb-announce=bgp" {
		t.Errorf("fairlead's is %+v", ours)
	}
}

// On the way, only nodes that are moved have sessions of fairlead lb. Afterwards a peer is for its nodes as before, and what else was
// changed in it stays.
func TestPeers(t *testing.T) {
	p, _ := byBGP(t)
	peers := p.Peers()
	if len(peers) != 1 || peers[0].Spec.NodeSelector == nil || peers[0].Labels[metallb.PoolLabel] == "" {
		t.Fatalf("%+v", peers)
	}
	for _, selector := range []*metav1.LabelSelector{nil, {MatchLabels: map[string]string{"rack": "1"}}} {
		peer := peers[0].DeepCopy()
		peer.Spec.NodeSelector, peer.Spec.Address = selector.DeepCopy(), "192.0.2.9"
		before := peer.DeepCopy()
		for _, moved := range []bool{false, true, false} {
			metallb.Restrict(peer, moved)
			if metallb.Restrict(peer, moved) {
				t.Errorf("%t a second time is a change: %+v", moved, peer.Spec)
			}
			if same := equality.Semantic.DeepEqual(peer.Spec, before.Spec); same == moved || peer.Spec.Address != "192.0.2.9" {
				t.Errorf("%t: %+v", moved, peer.Spec)
			}
		}
	}
}

// A change of BGP stays one whatever becomes of MetalLB's objects: where its peers cannot be read, nothing goes on.
func TestUnread(t *testing.T) {
	without := pool() + object("v1beta1", "L2Advertisement", "a", `{}`)
	held := func(c *metallb.Cluster) { c.Speaker.Annotations[metallb.Strategy] = `{"type":"RollingUpdate"}` }
	labelled := func(c *metallb.Cluster) { c.Sessions.Nodes[1].Labels[metallb.NodeLabel] = metallb.Moved }
	for _, c := range []struct {
		name, objects string
		phase         metallb.Phase
		change        func(*metallb.Cluster)
		bgp           bool
		want          string // a part of the error
	}{
		{"by BGP", pool() + bgp(""), metallb.Both, held, true, ""},
		{"without a peer", without, metallb.Both, held, true, metallb.Strategy + "), and MetalLB's peers cannot be read: there is no"},
		{"a moved node", without, metallb.After, labelled, true, "node n2 has the label"},
		{"a new field", pool() + bgp(`,"new":1`), metallb.Returning, held, true, `unknown field "spec.new"`},
		{"no objects", "", metallb.Both, labelled, true, "there is no object of metallb.io"},
		{"by ARP", without, metallb.Both, func(*metallb.Cluster) {}, false, ""},
		{"by ARP, and not read", "x", metallb.Both, func(*metallb.Cluster) {}, false, ""},
		{"not begun", without, metallb.Before, labelled, true, ""},
	} {
		in := &metallb.Cluster{Objects: []byte(c.objects), Sessions: sessions(nil), Controller: &appsv1.Deployment{}}
		in.Speaker = &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "metallb-system", Name: "speaker"}}
		in.Speaker.Annotations = map[string]string{metallb.Annotation: string(c.phase), metallb.Replicas: "1"}
		c.change(in)
		p := metallb.Decide(in)
		err := p.Unread()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || p.BGP() != c.bgp {
			t.Errorf("%s: %v, BGP %t", c.name, err, p.BGP())
		}
		if err != nil && !slices.Contains(p.Refused, err.Error()) {
			t.Errorf("%s: refused is %v", c.name, p.Refused)
		}
	}
}

// Each peer with a password has a Secret of its own, and fairlead lb may read no other one: a name of MetalLB's could be that of any
// Secret of kube-system.
func TestPasswords(t *testing.T) {
	const secret = `,"passwordSecret":{"name":"bootstrap-token-x"}`
	for _, c := range []struct {
		name, peer string
		secret     map[string][]byte // nil if there is none
		password   string            // empty if it is refused
	}{
		{"in a Secret", secret, map[string][]byte{"password": []byte("s3cret")}, "s3cret"},
		{"no Secret", secret, nil, ""},
		{"another key", secret, map[string][]byte{"pasword": []byte("s3cret")}, ""},
		{"an empty key", secret, map[string][]byte{"password": {}}, ""},
		{"in the object", `,"password":"x"`, nil, "x"},
		{"a Secret of our name", `,"passwordSecret":{"name":"fairlead-bgp-router"}`, nil, ""},
	} {
		in := &metallb.Cluster{Objects: []byte(pool() + bgp(c.peer)), Sessions: sessions(nil), Controller: &appsv1.Deployment{}}
		in.Speaker = &appsv1.DaemonSet{}
		in.Speaker.Status.DesiredNumberScheduled, in.Speaker.Status.NumberReady = 2, 2
		if c.secret != nil {
			in.Secrets = map[string]*corev1.Secret{"bootstrap-token-x": {Data: c.secret}}
		}
		p := metallb.Decide(in)
		role := &rbacv1.Role{Rules: []rbacv1.PolicyRule{{Resources: []string{"secrets"}, ResourceNames: []string{"fairlead-lb"}}}}
		p.Permit(role)
		if got := role.Rules[0].ResourceNames; !slices.Equal(got, []string{"fairlead-lb", "fairlead-bgp-router"}) {
			t.Errorf("%s: the Role names %v", c.name, got)
		}
		if got := p.Peers()[0].Spec.PasswordSecretRef; got == nil || got.Name != "fairlead-bgp-router" {
			t.Errorf("%s: the peer refers to %+v", c.name, got)
		}
		refused := strings.Join(p.Refused, "\n")
		bad := strings.Contains(refused, "BGPPeer router: the Secret")
		if got := p.Password("fairlead-bgp-router"); got != c.password || bad != (c.password == "") {
			t.Errorf("%s: the password is %q, refused %q", c.name, got, refused)
		}
	}
}
