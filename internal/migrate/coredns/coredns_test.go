package coredns_test

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/migrate/coredns"
)

// From every phase both ways lead to their end. CoreDNS ends only when the nodes have seen that the Service leads to fairlead, and
// fairlead only when they have seen that it leads to CoreDNS.
func TestStepsLeadOnFromEveryPhase(t *testing.T) {
	for _, back := range []bool{false, true} {
		want := coredns.After
		if back {
			want = coredns.Before
		}
		for _, start := range []coredns.Phase{coredns.Before, coredns.Beside, coredns.Both, coredns.Switched, coredns.After,
			coredns.Returning} {
			at, done := start, map[coredns.Action]bool{}
			for n := 0; at != want || n == 0; n++ {
				if n > 5 {
					t.Fatalf("from %s, back %v: the way does not end", start, back)
				}
				for _, s := range coredns.Steps(at, back) {
					if s.Action == coredns.Enter && s.Phase == coredns.After && !(done[coredns.AwaitFairlead] && done[coredns.Settle]) {
						t.Errorf("from %s: CoreDNS ends after %v", start, done)
					}
					if s.Action == coredns.Remove && at == coredns.Returning && !(done[coredns.AwaitCoreDNS] && done[coredns.Settle]) {
						t.Errorf("from %s: fairlead ends after %v", start, done)
					}
					if done[s.Action] = true; s.Action == coredns.Enter {
						at = s.Phase
					}
				}
			}
		}
	}
	if steps := coredns.Steps(coredns.Both, false); steps[len(steps)-1].Phase != coredns.Switched ||
		!slices.ContainsFunc(steps, func(s coredns.Step) bool { return s.Action == coredns.Compare }) {
		t.Errorf("the Service leaves CoreDNS after %v, without a comparison", steps)
	}
	if steps := coredns.Steps(coredns.Before, true); len(steps) != 0 {
		t.Errorf("without a migration the way back has the steps %v", steps)
	}
	if _, err := coredns.ParsePhase("bodh"); err == nil || !strings.Contains(err.Error(), "want none, or one of beside, both") {
		t.Errorf("an annotation with a mistake: %v", err)
	}
}

const corefile = `.:53 {
    health {
        lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa {
        resyncperiod 1s
    }
    import custom/*.override
    forward . /etc/resolv.conf
}
`

func deployment(name string, labels map[string]string, args ...string) *appsv1.Deployment {
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "kube-system"}}
	d.Spec.Replicas = new(int32(2))
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	d.Spec.Template.Labels = labels
	d.Spec.Template.Spec.Containers = []corev1.Container{{Name: name, Image: name + ":1", Args: args}}
	return d
}

// cluster has RKE2's labels, k3s's ConfigMap of additions, and a port with a name.
func cluster() *coredns.Cluster {
	labels := map[string]string{"k8s-app": "kube-dns", "app.kubernetes.io/name": "rke2-coredns"}
	d := deployment("coredns", labels, "-conf", "/etc/coredns/Corefile")
	spec := &d.Spec.Template.Spec
	spec.Tolerations = []corev1.Toleration{{Key: "CriticalAddonsOnly"}}
	spec.Volumes = []corev1.Volume{
		{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: "coredns"}, Items: []corev1.KeyToPath{{Key: "Core", Path: "Corefile"}},
		}}},
		{Name: "custom", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: "coredns-custom"}, Optional: new(true),
		}}},
	}
	c := &spec.Containers[0]
	c.VolumeMounts = []corev1.VolumeMount{{Name: "config", MountPath: "/etc/coredns"}, {Name: "custom", MountPath: "/etc/coredns/custom"}}
	c.Ports = []corev1.ContainerPort{{Name: "udp-53", ContainerPort: 1053, Protocol: corev1.ProtocolUDP}}
	c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{
		HTTPGet: &corev1.HTTPGetAction{Path: "/ready", Port: intstr.FromInt32(8181)},
	}}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "rke2-coredns", Namespace: "kube-system", Labels: labels}}
	service.Spec = corev1.ServiceSpec{ClusterIP: "10.43.0.10", ClusterIPs: []string{"10.43.0.10", "fd00::a"}, Selector: labels}
	service.Spec.Ports = []corev1.ServicePort{
		{Name: "udp-53", Port: 53, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromString("udp-53")},
	}
	external := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "external", Namespace: "default"}}
	external.Spec.Type = corev1.ServiceTypeExternalName
	return &coredns.Cluster{
		Deployments: []*appsv1.Deployment{d, deployment("metrics-server", map[string]string{"k8s-app": "metrics-server"})},
		ConfigMaps:  map[string]*corev1.ConfigMap{"coredns": {Data: map[string]string{"Core": corefile, "other": "x"}}},
		Services:    []*corev1.Service{external, service},
	}
}

// The plan shows what differs and what is refused, with the line of the Corefile.
func TestDecide(t *testing.T) {
	set := func(text string) func(*coredns.Cluster) {
		return func(c *coredns.Cluster) { c.ConfigMaps["coredns"].Data["Core"] = text }
	}
	annotate := func(pairs ...string) func(*coredns.Cluster) {
		return func(c *coredns.Cluster) { c.Deployments[0].Annotations = map[string]string{pairs[0]: pairs[1]} }
	}
	for _, c := range []struct {
		name   string
		change func(*coredns.Cluster)
		want   string
		bad    bool // refused
		broken bool
	}{
		{"what runs", nil, "Deployment coredns of 2 Pods, coredns:1, behind the Service rke2-coredns, configured by the ConfigMap coredns",
			false, false},
		{"a setting without effect", nil, "/etc/coredns/Corefile:7: ", false, false},
		{"the phase", annotate(coredns.Annotation, "both"), `"phase":"both"`, false, false},
		{"a phase in which the Service selects less", func(c *coredns.Cluster) {
			annotate(coredns.Annotation, "switched")(c)
			c.Services[1].Spec.Selector = map[string]string{"k8s-app": "kube-dns", coredns.PodLabel: "server"}
		}, `"phase":"switched"`, false, false},
		{"an unknown plugin", set(".:53 {\n  nosuch\n}\n"), "ConfigMap coredns: corefile: /etc/coredns/Corefile:2: unknown plugin", true, false},
		{"a file of additions", func(c *coredns.Cluster) {
			c.ConfigMaps["coredns-custom"] = &corev1.ConfigMap{Data: map[string]string{"a.override": "nosuch\n"}}
		}, "/etc/coredns/custom/a.override:1: unknown plugin", true, false},
		{"not for a cluster", set(".:53 {\n  forward . 192.0.2.1\n}\n"), "no server block has the plugin kubernetes", true, false},
		{"no ConfigMap", func(c *coredns.Cluster) { c.ConfigMaps = nil }, "the ConfigMap coredns, which is not there", true, false},
		{"the hosts' network", func(c *coredns.Cluster) { c.Deployments[0].Spec.Template.Spec.HostNetwork = true },
			"network of its hosts", true, false},
		{"no Pods", func(c *coredns.Cluster) { c.Deployments[0].Spec.Replicas = new(int32) }, "scale it up first", true, false},
		{"an autoscaler", func(c *coredns.Cluster) {
			c.Deployments = append(c.Deployments, deployment("scaler", nil, "--target=Deployment/coredns"))
		}, "scale scaler to 0 first", true, false},
		{"an autoscaler that is off", func(c *coredns.Cluster) {
			c.Deployments = append(c.Deployments, deployment("scaler", nil, "--target=Deployment/coredns"))
			c.Deployments[2].Spec.Replicas = new(int32)
		}, "", false, false},
		{"no Service", func(c *coredns.Cluster) { c.Services = nil }, "there is no Service kube-dns", true, true},
		{"no Deployment", func(c *coredns.Cluster) { c.Deployments = nil }, "the Pods of 0 Deployments", true, true},
		{"two Deployments", func(c *coredns.Cluster) {
			c.Deployments = append(c.Deployments, deployment("other", c.Services[1].Spec.Selector))
		}, "the Pods of 2 Deployments (coredns, other)", true, true},
		{"another server", func(c *coredns.Cluster) { c.Deployments[0].Spec.Template.Spec.Containers[0].Args = nil },
			"no container with the argument -conf", true, true},
		{"a port that is not there", func(c *coredns.Cluster) { c.Deployments[0].Spec.Template.Spec.Containers[0].Ports = nil },
			"targetPort udp-53, which no port", true, true},
		{"by hand", func(c *coredns.Cluster) {
			c.Deployments = append(c.Deployments, deployment("fairlead-dns", c.Services[1].Spec.Selector))
		}, "was not installed by 'fairlead migrate'", true, true},
		{"by hand in a phase", func(c *coredns.Cluster) {
			annotate(coredns.Annotation, "both")(c)
			c.Deployments = append(c.Deployments, deployment("fairlead-dns", nil))
		}, "was not installed by 'fairlead migrate'", true, true},
		{"a phase with a mistake", annotate(coredns.Annotation, "bodh"), "want none, or one of beside", true, true},
		{"a number with a mistake", annotate(coredns.Replicas, "-1"), "want a number from 1 on", true, true},
	} {
		in := cluster()
		if c.change != nil {
			c.change(in)
		}
		p := coredns.Decide(in)
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		plain := strings.NewReplacer(`\u003c`, "<", `\u003e`, ">").Replace(string(text))
		if !strings.Contains(plain, c.want) || c.bad != (len(p.Refused) > 0) || c.broken != (p.Broken() != nil) {
			t.Errorf("%s: want %q, refused %v, broken %v:\n%s", c.name, c.want, c.bad, c.broken, plain)
		}
		if strings.Contains(plain, os.TempDir()+"/") {
			t.Errorf("%s: a directory of this machine: %s", c.name, plain)
		}
	}
}

// The questions are for kubernetes, and for a sample of Services which is bounded. An ExternalName is not among them.
func TestQuestions(t *testing.T) {
	in := cluster()
	got := coredns.Decide(in).Questions()
	for _, want := range []string{
		"rke2-coredns.kube-system.svc.cluster.local./A", "rke2-coredns.kube-system.svc.cluster.local./AAAA", "10.0.43.10.in-addr.arpa./PTR",
		"_udp-53._udp.rke2-coredns.kube-system.svc.cluster.local./SRV", "fairlead-no-such-name.default.svc.cluster.local./A",
		"a.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.d.f.ip6.arpa./PTR",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("%s is not among %v", want, got)
		}
	}
	if slices.ContainsFunc(got, func(q string) bool { return strings.HasPrefix(q, "external.") }) {
		t.Errorf("a name of another server is among %v", got)
	}
	for range 5000 {
		in.Services = append(in.Services, in.Services[1])
	}
	in.Services = append(in.Services, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes", Namespace: "default"}})
	got = coredns.Decide(in).Questions()
	if len(got) > 5*31+2 || !slices.Contains(got, "kubernetes.default.svc.cluster.local./A") {
		t.Errorf("%d questions: %v", len(got), got)
	}
}

// fairlead's Deployment has CoreDNS's files, ports, probes and nodes; its Pods get the Service's labels last, and CoreDNS's Deployment
// is the same again on the way back.
func TestOurs(t *testing.T) {
	base := deployment("fairlead-dns", map[string]string{"app.kubernetes.io/name": "fairlead-dns", "k8s-app": "kube-dns"})
	base.Spec.Template.Spec.Containers[0] = corev1.Container{
		Image: "fairlead", Ports: []corev1.ContainerPort{{Name: "ready", ContainerPort: 8181}, {Name: "health", ContainerPort: 8080}},
		ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromString("ready")}}},
		LivenessProbe:  &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromString("health")}}},
	}
	in := cluster()
	p := coredns.Decide(in)
	beside, both := p.Ours(base, false, "mirror/fairlead:1"), p.Ours(base, true, "")
	if _, has := beside.Spec.Template.Labels["k8s-app"]; has || both.Spec.Template.Labels["app.kubernetes.io/name"] != "rke2-coredns" {
		t.Errorf("the labels are %v, then %v", beside.Spec.Template.Labels, both.Spec.Template.Labels)
	}
	for k, v := range beside.Spec.Selector.MatchLabels {
		if beside.Spec.Template.Labels[k] != v || both.Spec.Template.Labels[k] != v || both.Spec.Selector.MatchLabels[k] != v {
			t.Errorf("the selector %v does not select the Pods", beside.Spec.Selector.MatchLabels)
		}
	}
	spec := beside.Spec.Template.Spec
	c := spec.Containers[0]
	if strings.Join(c.Args, " ") != "dns --corefile=/etc/coredns/Corefile" || c.Image != "mirror/fairlead:1" || len(spec.Volumes) != 2 ||
		len(spec.Tolerations) != 1 || *beside.Spec.Replicas != 2 || !c.VolumeMounts[1].ReadOnly {
		t.Errorf("the Pod is %+v", spec)
	}
	if c.ReadinessProbe.HTTPGet.Path != "/ready" || c.LivenessProbe.HTTPGet.Port.IntValue() != 8080 || c.Ports[0].ContainerPort != 1053 {
		t.Errorf("the probes are %+v and %+v, the ports %v", c.ReadinessProbe, c.LivenessProbe, c.Ports)
	}
	pod := coredns.PodFor(beside, []string{"10.0.0.1:53"}, "10.0.0.2:53", p.Questions(), 10*time.Second)
	if !slices.Contains(pod.Spec.Containers[0].Args, "--within=5s") {
		t.Errorf("answers may differ for longer than half of the timeout: %v", pod.Spec.Containers[0].Args)
	}
	if len(pod.Spec.Volumes) > 0 || *pod.Spec.AutomountServiceAccountToken || pod.Labels["k8s-app"] != "" {
		t.Errorf("the Pod that compares is %+v", pod)
	}
	budget := coredns.Budget(&policyv1.PodDisruptionBudget{})
	if budget.Spec.Selector.MatchLabels[coredns.PodLabel] == "" {
		t.Errorf("the budget is %+v", budget.Spec)
	}
	before, _ := json.Marshal(in.Deployments[0])
	now := in.Deployments[0]
	for _, phase := range []coredns.Phase{coredns.Beside, coredns.Both, coredns.Switched, coredns.After, coredns.Both,
		coredns.Returning} {
		now = p.Enter(now, phase)
		if want := map[bool]int32{true: 0, false: 2}[phase == coredns.After]; *now.Spec.Replicas != want {
			t.Errorf("in phase %s CoreDNS has %d Pods, want %d", phase, *now.Spec.Replicas, want)
		}
		in.Deployments[0] = now
		p = coredns.Decide(in) // what another command finds
		if p.Phase != phase {
			t.Errorf("in phase %s another command finds %s", phase, p.Phase)
		}
	}
	now = p.Enter(now, coredns.Before)
	if after, _ := json.Marshal(now); strings.Replace(string(after), `,"annotations":{}`, "", 1) != string(before) {
		t.Errorf("CoreDNS's Deployment is %s, was %s", after, before)
	}
}
