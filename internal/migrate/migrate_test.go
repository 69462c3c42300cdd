package migrate_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/migrate"
)

// From every phase both ways lead to their end, and the rules of one program are removed only after the other's were
// checked without it.
func TestStepsLeadOnFromEveryPhase(t *testing.T) {
	for _, c := range []struct{ back, drains bool }{{false, false}, {false, true}, {true, false}, {true, true}} {
		back, want := c.back, migrate.After
		if back {
			want = migrate.Before
		}
		for _, start := range []migrate.Phase{migrate.Before, migrate.Beside, migrate.Switched, migrate.After, migrate.Returning} {
			at, checked, drained := start, migrate.Program(""), false
			for n := 0; ; n++ {
				steps := migrate.Steps(at, back, c.drains)
				if len(steps) == 0 {
					break
				}
				if n > 4 {
					t.Fatalf("from %s, back %v: the way does not end", start, back)
				}
				undrains := len(steps) > 0 && steps[0].Action == migrate.Undrain
				if undrains != (back && c.drains && at == migrate.Switched) {
					t.Errorf("from %s, back %v, drains %v: %v", at, back, c.drains, steps)
				}
				for i, s := range steps {
					if s.Action == migrate.Check && s.Only {
						checked = s.Program
					}
					drained = drained || s.Action == migrate.Drain && checked == migrate.Fairlead
					if s.Action == migrate.CleanUp && s.Program == migrate.KubeProxy && drained != c.drains {
						t.Errorf("from %s: %s, drained %v, want %v", start, s, drained, c.drains)
					}
					if s.Action == migrate.CleanUp && (checked == "" || checked == s.Program) {
						t.Errorf("from %s, back %v: %s after a check of %q", at, back, s, checked)
					}
					if (s.Action == migrate.Enter) != (i == len(steps)-1) {
						t.Errorf("from %s, back %v: step %d is %s", at, back, i, s)
					}
					at = s.Phase
				}
			}
			if at != want {
				t.Errorf("from %s, back %v: the way ends at %s", start, back, at)
			}
		}
	}
	if _, err := migrate.ParsePhase("faihlead"); err == nil || !strings.Contains(err.Error(), "want none, or one of beside, switched") {
		t.Errorf("a label with a mistake: %v", err)
	}
}

// kubeProxy is a DaemonSet with a command line, whose file is in a ConfigMap.
func kubeProxy(command ...string) *appsv1.DaemonSet {
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy", Namespace: "kube-system"}}
	d.Spec.Template.Spec = corev1.PodSpec{
		NodeSelector: map[string]string{"kubernetes.io/os": "linux"},
		Containers: []corev1.Container{{
			Name: "kube-proxy", Image: "kube-proxy:v1.37.2", Command: command, Env: []corev1.EnvVar{{Name: "NODE_NAME"}},
			VolumeMounts: []corev1.VolumeMount{{Name: "config", MountPath: "/etc/kp"}, {Name: "lock", MountPath: "/run/xtables.lock"}},
		}},
		Volumes: []corev1.Volume{
			{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: corev1.LocalObjectReference{Name: "kp"},
			}}},
			{Name: "lock", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/run/xtables.lock"}}},
		},
	}
	return d
}

const head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

func configMaps(text string) map[string]*corev1.ConfigMap {
	return map[string]*corev1.ConfigMap{"kp": {Data: map[string]string{"config": text}}}
}

// kube-proxy's DaemonSet keeps the affinity that it has, gets one expression more, and is the same again without it.
func TestExcludeAndInclude(t *testing.T) {
	other := corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpExists}
	some := &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{other}}, {
			MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"a"}}},
		}},
	}}}
	for name, affinity := range map[string]*corev1.Affinity{"none": nil, "some": some} {
		d := kubeProxy("kube-proxy")
		d.Spec.Template.Spec.Affinity = affinity
		before, _ := json.Marshal(d)
		excluded := migrate.Exclude(migrate.Exclude(d))
		terms := excluded.Spec.Template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		for _, term := range terms {
			n := 0
			for _, e := range term.MatchExpressions {
				off := e.Operator == corev1.NodeSelectorOpNotIn && slices.Equal(e.Values, []string{"fairlead", "switched"})
				if e.Key == migrate.Label && off {
					n++
				}
			}
			if n != 1 {
				t.Errorf("%s: the term %+v", name, term)
			}
		}
		if after, _ := json.Marshal(migrate.Include(excluded)); string(after) != string(before) {
			t.Errorf("%s: is %s, was %s", name, after, before)
		}
		if now, _ := json.Marshal(d); string(now) != string(before) {
			t.Errorf("%s: the argument was changed", name)
		}
	}
}

// Settings come from the file or the flags; an unreadable or refused one is an error that names it.
func TestReadSettings(t *testing.T) {
	file := []string{"/usr/local/bin/kube-proxy", "--config=/etc/kp/config", "--hostname-override=$(NODE_NAME)"}
	for _, c := range []struct {
		name, text string
		command    []string
		want       string // mode, healthz, metrics, or a part of the error
	}{
		{"kubeadm", head, file, "iptables 127.0.0.1:10256 127.0.0.1:10249"},
		{"kubeadm with IPv6", head + "bindAddress: '::'\n", file, "iptables [::1]:10256 [::1]:10249"},
		{"kubeadm with IPv4", head + "bindAddress: 0.0.0.0\n", file, "iptables 127.0.0.1:10256 127.0.0.1:10249"},
		{"IPv6 by a flag", "", []string{"kube-proxy", "--bind-address=fd00::1", "--healthz-port=7"}, "iptables [::1]:7 [::1]:10249"},
		{"IPv6 with an address", head + "bindAddress: '::'\nmetricsBindAddress: 127.0.0.1\n", file,
			"iptables [::1]:10256 127.0.0.1:10249"},
		{"a wrong bind address", "", []string{"kube-proxy", "--bind-address=x"}, `--bind-address is "x"`},
		{"file", head + "mode: nftables\nhealthzBindAddress: 10.0.0.1\nmetricsBindAddress: 0.0.0.0:99\n", file,
			"nftables 10.0.0.1:10256 127.0.0.1:99"},
		{"flags", "", []string{"kube-proxy", "--proxy-mode", "ipvs", "--healthz-port=7", "--metrics_bind_address=[::]:8"},
			"ipvs 127.0.0.1:7 [::1]:8"},
		{"a wrong value", head + "conntrack:\n  min: -1\n", file, "ConfigMap kp, config: line 4: conntrack.min"},
		{"not a file of kube-proxy", "a: b\n", file, "want a document with apiVersion"},
		{"no YAML", "a: [\n", file, "ConfigMap kp, config: yaml"},
		{"an empty file", "", file, "is the key config of the ConfigMap kp, which is not there"},
		{"a file of the host", head, []string{"kube-proxy", "--config=/host/kp"}, "mounts from no ConfigMap"},
		{"a shell", head, []string{"sh", "-c", "kube-proxy"}, `starts "sh"`},
		{"no command", head, nil, "has no command"},
		{"no health checks", "", []string{"kube-proxy", "--healthz-port=0"}, "no --healthz-bind-address, by which a node is checked: " +
			"give it one, such as 0.0.0.0:10256"},
		{"a wrong address", "", []string{"kube-proxy", "--metrics-bind-address=x"}, `--metrics-bind-address is "x"`},
	} {
		s, err := migrate.ReadSettings(kubeProxy(c.command...), configMaps(c.text))
		got := ""
		if err == nil {
			got = s.Mode + " " + s.Healthz.String() + " " + s.Metrics.String()
		} else {
			got = err.Error()
		}
		if (err == nil && got != c.want) || !strings.Contains(got, c.want) {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// fairlead's DaemonSet has kube-proxy's flags and files, and only its own privileges.
func TestOurs(t *testing.T) {
	base := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "fairlead-proxy", Namespace: "kube-system"}}
	base.Spec.Template.Spec.Containers = []corev1.Container{{
		Image: "fairlead", ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/healthz"}}},
	}}
	theirs := migrate.Exclude(kubeProxy("kube-proxy", "--config=/etc/kp/config", "--v=2"))
	privileged := true
	theirs.Spec.Template.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &privileged}
	s, err := migrate.ReadSettings(theirs, configMaps(head+"healthzBindAddress: 0.0.0.0:999\n"))
	if err != nil {
		t.Fatal(err)
	}
	ours := migrate.Ours(base, theirs, s, "mirror/fairlead:1")
	spec := ours.Spec.Template.Spec
	c := spec.Containers[0]
	if got := strings.Join(c.Args, " "); got != "proxy --config=/etc/kp/config --v=2 --mode=nft" {
		t.Errorf("the arguments are %s", got)
	}
	if len(spec.Volumes) != 1 || len(c.VolumeMounts) != 1 || c.VolumeMounts[0].MountPath != "/etc/kp" || !c.VolumeMounts[0].ReadOnly {
		t.Errorf("the files are %+v of %+v", c.VolumeMounts, spec.Volumes)
	}
	if c.SecurityContext != nil || c.Image != "mirror/fairlead:1" || len(c.Env) != 1 || c.ReadinessProbe.HTTPGet.Port.IntValue() != 999 {
		t.Errorf("the container is %+v", c)
	}
	terms := spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	if len(terms) != 1 || len(terms[0].MatchExpressions) != 1 || terms[0].MatchExpressions[0].Operator != corev1.NodeSelectorOpIn {
		t.Errorf("the affinity is %+v", terms)
	}
	take := migrate.PodFor(migrate.Step{Action: migrate.Check, Program: migrate.Fairlead, Only: true, Takes: true}, "n1", theirs, ours, s)
	if args := take.Spec.Containers[0].Args; !slices.Contains(args, "--take-clients") {
		t.Errorf("a check before the rules are removed runs %v", args)
	}
	check := migrate.PodFor(migrate.Step{Action: migrate.Check, Program: migrate.Fairlead, Only: true}, "n1", theirs, ours, s)
	if got := strings.Join(check.Spec.Containers[0].Args, " "); check.Spec.NodeName != "n1" || check.Spec.RestartPolicy != "Never" ||
		got != "migrate check-node --node=n1 --program=fairlead --within=60s --healthz=127.0.0.1:999 --metrics=127.0.0.1:10249" {
		t.Errorf("the Pod that checks runs %s: %+v", got, check.Spec)
	}
	back := migrate.PodFor(migrate.Step{Action: migrate.Check, Program: migrate.KubeProxy}, "n1", theirs, ours, s)
	if got := strings.Join(back.Spec.Containers[0].Args, " "); got !=
		"migrate check-node --node=n1 --program=kube-proxy --within=60s --mode=iptables" {
		t.Errorf("the Pod that checks kube-proxy runs %s", got)
	}
	clean := migrate.PodFor(migrate.Step{Action: migrate.CleanUp, Program: migrate.KubeProxy}, "n1", theirs, ours, s)
	k := clean.Spec.Containers[0]
	if k.Image != "kube-proxy:v1.37.2" || !*k.SecurityContext.Privileged || !slices.Equal(k.Args, []string{"--cleanup"}) ||
		clean.Name == check.Name {
		t.Errorf("the Pod that removes kube-proxy's rules is %+v", clean)
	}
}

func node(name string, ready bool, labels map[string]string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	if ready {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	}
	return n
}

// ours is fairlead's DaemonSet as a migration installs it, beside an affinity of the administrator.
func ours() *appsv1.DaemonSet {
	theirs := kubeProxy("kube-proxy")
	theirs.Spec.Template.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpExists}}},
			{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "rack", Operator: corev1.NodeSelectorOpExists}}},
		}}}}
	return migrate.Ours(kubeProxy("fairlead"), theirs, &migrate.Settings{}, "")
}

// The plan names what differs, and refuses what would lose connections or cannot be read.
func TestDecide(t *testing.T) {
	pods := func(nodes ...string) (out []*corev1.Pod) {
		for _, n := range nodes {
			out = append(out, &corev1.Pod{Spec: corev1.PodSpec{NodeName: n}})
		}
		return out
	}
	sticky := &corev1.Service{Spec: corev1.ServiceSpec{SessionAffinity: corev1.ServiceAffinityClientIP}}
	good := func() *migrate.Cluster {
		return &migrate.Cluster{
			KubeProxy: kubeProxy("kube-proxy", "--config=/etc/kp/config"), ConfigMaps: configMaps(head + "mode: iptables\nportRange: 1-2\n"),
			Nodes: []*corev1.Node{node("b", true, nil), node("a", true, map[string]string{migrate.Label: "beside"}), node("c", true, nil)},
			Pods:  pods("a", "b"), Services: []*corev1.Service{sticky},
		}
	}
	for _, c := range []struct {
		name   string
		change func(*migrate.Cluster)
		nodes  []string
		want   string
		bad    bool
	}{
		{"all is well", nil, nil, "", false},
		{"iptables", nil, nil, "'iptables-save' does not", false},
		{"127.0.0.1", nil, nil, "route_localnet", false},
		{"affinity", nil, nil, "session affinity (1): clients keep their endpoint", false},
		{"affinity with IPVS", func(c *migrate.Cluster) { c.ConfigMaps = configMaps(head + "mode: ipvs\n") }, nil,
			"session affinity (1): a client may get another endpoint once", false},
		{"a field without effect", nil, nil, "portRange has no effect", false},
		{"without kube-proxy", nil, nil, `"name":"c","phase":"","skipped":"kube-proxy does not run there"`, false},
		{"ipvs", func(c *migrate.Cluster) { c.ConfigMaps = configMaps(head + "mode: ipvs\n") }, nil,
			"connections that go through IPVS end with its rules", false},
		{"a wrong value", func(c *migrate.Cluster) { c.ConfigMaps = configMaps(head + "mode: foo\n") }, nil, "line 3: mode", true},
		{"hard failure", func(c *migrate.Cluster) { c.ConfigMaps = configMaps(head + "bindAddressHardFail: true\n") }, nil,
			"--bind-address-hard-fail", true},
		{"no hard failure", func(c *migrate.Cluster) { c.ConfigMaps = configMaps(head + "bindAddressHardFail: false\n") }, nil, "", false},
		{"hard failure by a flag", func(c *migrate.Cluster) {
			c.KubeProxy = kubeProxy("kube-proxy", "--bind-address-hard-fail", "--v=2")
		}, nil, "--bind-address-hard-fail", true},
		{"k3s", func(c *migrate.Cluster) { c.KubeProxy = nil }, nil, "no DaemonSet kube-proxy", true},
		{"a node that is not ready", func(c *migrate.Cluster) { c.Nodes[0] = node("b", false, nil) }, nil, "Node b is not ready", true},
		{"that node is not chosen", func(c *migrate.Cluster) { c.Nodes[0] = node("b", false, nil) }, []string{"a"}, "not among --nodes", false},
		{"an unknown node", nil, []string{"a", "z"}, "no Node z", true},
		{"by hand", func(c *migrate.Cluster) { c.Fairlead = kubeProxy("fairlead") }, nil, "was not installed by 'fairlead migrate'", true},
		{"by migrate", func(c *migrate.Cluster) { c.Fairlead = ours() }, nil, "session affinity (1)", false},
		{"no node", func(c *migrate.Cluster) { c.Nodes, c.Pods = nil, nil }, nil, "no node is left", true},
		{"a label with a mistake", func(c *migrate.Cluster) { c.Nodes[1].Labels[migrate.Label] = "x" }, nil, "Node a: the label", true},
	} {
		cluster := good()
		if c.change != nil {
			c.change(cluster)
		}
		p := migrate.Decide(cluster, c.nodes)
		text := &strings.Builder{}
		enc := json.NewEncoder(text)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(p); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text.String(), c.want) || c.bad != (len(p.Refused) > 0) {
			t.Errorf("%s: want %q, refused %v:\n%s", c.name, c.want, c.bad, text)
		}
		mistake := c.name == "an unknown node" || c.name == "a label with a mistake"
		if err := p.Mistakes(); mistake != (err != nil) || mistake && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: the mistakes are %v", c.name, err)
		}
	}
}
