package runner_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/runner"
)

// asked is a Pod with a securityContext, and what its process sees of it.
type asked struct {
	name, level string
	ask         func(*corev1.PodSpec, *corev1.SecurityContext)
	script      string
	want        []string // expressions that match the output, or the reason not to start
	lacks       string   // one that does not
	waits       bool     // it is not started
}

// identity prints whom the process is, rights its capabilities and what is taken from it.
const (
	identity = `grep -E '^(Uid|Gid|Groups):' /proc/self/status | tr '\t' ' '`
	rights   = `grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status | tr '\t' ' '`
)

func withCapabilities(add, drop string) func(*corev1.PodSpec, *corev1.SecurityContext) {
	return func(_ *corev1.PodSpec, s *corev1.SecurityContext) {
		s.Capabilities = &corev1.Capabilities{}
		if add != "" {
			s.Capabilities.Add = []corev1.Capability{corev1.Capability(add)}
		}
		if drop != "" {
			s.Capabilities.Drop = []corev1.Capability{corev1.Capability(drop)}
		}
	}
}

func ofUser(uid int64) func(*corev1.PodSpec, *corev1.SecurityContext) {
	return func(_ *corev1.PodSpec, s *corev1.SecurityContext) { s.RunAsUser = &uid }
}

func both(fs ...func(*corev1.PodSpec, *corev1.SecurityContext)) func(*corev1.PodSpec, *corev1.SecurityContext) {
	return func(p *corev1.PodSpec, s *corev1.SecurityContext) {
		for _, f := range fs {
			f(p, s)
		}
	}
}

func nonRoot(p *corev1.PodSpec, _ *corev1.SecurityContext) {
	p.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: new(true)}
}

func noEscalation(_ *corev1.PodSpec, s *corev1.SecurityContext) {
	s.AllowPrivilegeEscalation = new(false)
}

func readOnly(_ *corev1.PodSpec, s *corev1.SecurityContext) {
	s.ReadOnlyRootFilesystem = new(true)
}

func seccomp(kind corev1.SeccompProfileType) func(*corev1.PodSpec, *corev1.SecurityContext) {
	return func(p *corev1.PodSpec, _ *corev1.SecurityContext) {
		profile := &corev1.SeccompProfile{Type: kind}
		if kind == corev1.SeccompProfileTypeLocalhost {
			profile.LocalhostProfile = new("mine.json")
		}
		p.SecurityContext = &corev1.PodSecurityContext{SeccompProfile: profile}
	}
}

// groups asks for groups, by each policy.
func groups(policy corev1.SupplementalGroupsPolicy) func(*corev1.PodSpec, *corev1.SecurityContext) {
	return func(p *corev1.PodSpec, s *corev1.SecurityContext) {
		p.SecurityContext = &corev1.PodSecurityContext{
			RunAsUser: new(int64(7)), RunAsGroup: new(int64(2345)), SupplementalGroups: []int64{3001, 3000}, SupplementalGroupsPolicy: &policy,
		}
		s.RunAsUser = new(int64(1234)) // before the Pod's
	}
}

// fsGroup adds a ConfigMap's files to the empty directory of every Pod here.
func fsGroup(p *corev1.PodSpec, s *corev1.SecurityContext) {
	p.SecurityContext = &corev1.PodSecurityContext{FSGroup: new(int64(2000))}
	p.Volumes = append(p.Volumes, corev1.Volume{Name: "c", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: "kube-root-ca.crt"}, DefaultMode: new(int32(0o400)),
	}}})
	p.Containers[0].VolumeMounts = append(p.Containers[0].VolumeMounts, corev1.VolumeMount{Name: "c", MountPath: "/media"})
	s.RunAsUser, s.RunAsGroup = new(int64(1234)), new(int64(1234))
}

func masked(_ *corev1.PodSpec, s *corev1.SecurityContext) { s.ProcMount = new(corev1.DefaultProcMount) }

func nothing(*corev1.PodSpec, *corev1.SecurityContext) {}

// ownFiles is what ls its own shows three files and the directory.
const ownFiles = `^total 0\n(.* [0-3] -> .*\n){4}$`

const writesAround = `for d in /srv /etc /tmp /var/tmp /dev/shm /opt; do
	touch $d/x 2>/dev/null && echo wrote $d && rm $d/x; done; echo > /dev/null && echo null`

var (
	capRoot  = regexp.QuoteMeta(`CapEff: 00000000a80425fb`) // containerd's default
	capNone  = `CapEff: 0{16}\n`
	boundNo  = `CapBnd: 0{16}\n`
	stopUser = `container's runAsUser breaks non-root policy \(pod: "attack-.*_level-.*\(.*\)", container: main\)`
)

// securityContexts are those that a Pod can ask for.
var securityContexts = []asked{
	{"root by the machine", "privileged", nonRoot, identity,
		[]string{`container has runAsNonRoot and image will run as root \(pod: "attack-`}, "", true},
	{"root by name", "privileged", both(nonRoot, ofUser(0)), identity, []string{stopUser}, "", true},
	{"confined root by name", "baseline", both(nonRoot, ofUser(0)), identity, []string{stopUser}, "", true},
	{"non-root by name", "privileged", both(nonRoot, ofUser(1234)), "(" + identity + ") > /dev/stdout",
		[]string{`Uid: 1234 1234 1234 1234\nGid: 0 0 0 0\nGroups: *\n`}, "", false},
	{"non-root by itself", "baseline", nonRoot, identity,
		[]string{`Uid: 1000 1000 1000 1000\nGid: 1000 1000 1000 1000\nGroups: *\n`}, "", false},
	{"groups", "privileged", groups(corev1.SupplementalGroupsPolicyMerge), identity,
		[]string{`Uid: 1234( 1234){3}\nGid: 2345( 2345){3}\nGroups: 3000 3001`}, "", false},
	{"strict groups", "baseline", groups(corev1.SupplementalGroupsPolicyStrict), identity,
		[]string{`Uid: 1234( 1234){3}\nGid: 2345( 2345){3}\nGroups: 3000 3001`}, "", false},
	{"root of a confined Pod", "baseline", ofUser(0), identity + "; " + rights,
		[]string{`Uid: 0( 0){3}\nGid: 0( 0){3}`, capRoot, `Seccomp: 2`}, "", false},
	{"a user without a number here", "baseline", ofUser(70000), identity,
		[]string{`users and groups of a Pod go from 0 to 65535`}, "", true},
	{"files' group", "privileged", fsGroup, identity + `; stat -c '%n %g %a' /opt; cat /media/ca.crt; stat -L -c '%g %a' /media/ca.crt`,
		[]string{`Groups: 2000`, `/opt 2000 2777`, `BEGIN CERTIFICATE`, `2000 440`}, "", false},
	{"files' group of a confined Pod", "baseline", fsGroup, identity + `; stat -c '%n %g %a' /opt;
		cat /media/ca.crt; stat -L -c '%g %a' /media/ca.crt;
		touch /opt/x; stat -c %g /opt/x`, []string{`Groups: 2000`, `/opt 2000 2777`, `BEGIN CERTIFICATE`, `\n2000 440\n2000\n$`}, "", false},
	{"all capabilities dropped", "privileged", withCapabilities("", "ALL"), rights, []string{capNone, boundNo}, "", false},
	{"one capability alone", "privileged", withCapabilities("NET_ADMIN", "all"), rights + "; ip link set lo mtu 60000 && echo done",
		[]string{`CapEff: 0{12}1000`, `CapBnd: 0{12}1000`, "done"}, "", false},
	{"one capability for a user", "privileged", both(withCapabilities("CAP_NET_ADMIN", "ALL"), ofUser(1234)),
		rights + "; ip link set lo mtu 60000 && echo done",
		[]string{`CapEff: 0{12}1000`, "done"}, "", false},
	{"one capability less", "privileged", withCapabilities("", "CHOWN"), rights + "; touch /tmp/$$; chown 1 /tmp/$$; rm /tmp/$$",
		[]string{`CapEff: [0-9a-f]{15}e`, "not permitted"}, "", false},
	{"an unknown capability", "privileged", withCapabilities("FLY", ""), rights, []string{`capability "FLY" is not known`}, "", true},
	{"a confined capability", "baseline", both(withCapabilities("NET_BIND_SERVICE", "ALL"), ofUser(1234)), rights,
		[]string{`CapEff: 0{13}400`, `CapBnd: 0{13}400`}, "", false},
	{"setuid", "privileged", ofUser(1234), "/srv/id -u; " + rights, []string{`^0\n`, "NoNewPrivs: 0"}, "", false},
	{"setuid without escalation", "privileged", both(ofUser(1234), noEscalation), "/srv/id -u; " + rights,
		[]string{`^1234\n`, "NoNewPrivs: 1"}, "", false},
	{"setuid of a confined Pod", "baseline", ofUser(1234), "/srv/id -u; " + rights, []string{`^1234\n`}, "", false},
	{"no escalation of a confined Pod", "baseline", noEscalation, rights, []string{"NoNewPrivs: 1"}, "", false},
	{"read-only", "privileged", readOnly, writesAround, []string{`wrote /opt\nnull`}, "wrote /(srv|etc|tmp|var)", false},
	{"read-only of a confined Pod", "baseline", readOnly, writesAround,
		[]string{`wrote /opt\nnull`}, "wrote /(srv|etc|tmp|var)", false},
	{"writable of a confined Pod", "baseline", nothing, writesAround,
		[]string{`wrote /tmp\nwrote /var/tmp\nwrote /dev/shm\nwrote /opt\nnull`},
		"wrote /(srv|etc)", false},
	{"no filter", "privileged", seccomp(corev1.SeccompProfileTypeUnconfined), rights, []string{"Seccomp: 0"}, "", false},
	{"the filter", "privileged", seccomp(corev1.SeccompProfileTypeRuntimeDefault), rights, []string{"Seccomp: 2"}, "", false},
	{"a filter of its own", "baseline", seccomp(corev1.SeccompProfileTypeLocalhost), rights,
		[]string{`seccompProfile of type Localhost is not supported`}, "", true},
	{"no files of others", "baseline", nothing, "ls -l /proc/self/fd", []string{ownFiles}, "", false},
	{"no files of others, privileged", "privileged", nothing, "ls -l /proc/self/fd", []string{ownFiles}, "", false},
	{"masked files", "baseline", both(ofUser(0), masked),
		`cat /proc/kcore /proc/keys /proc/timer_list 2>/dev/null | wc -c; ls /proc/acpi /proc/scsi /sys/firmware 2>/dev/null | grep -v : ;
		echo 1 > /proc/sys/kernel/domainname; test -e /proc/sysrq-trigger && echo h > /proc/sysrq-trigger; echo end`,
		[]string{`^0\n\n*sh.*domainname: Read-only`, "end"}, "", false},
}

// What a securityContext asks for is done, or the Pod waits with a kubelet's reason and
// message: nothing is left out in silence. Each is a process that looks at itself.
func TestSecurityContext(t *testing.T) {
	armed(t)
	id, err := exec.LookPath("id")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(id)
	if err == nil {
		err = os.WriteFile("/srv/id", b, 0o755)
	}
	if err == nil {
		err = os.Chmod("/srv/id", 0o755|os.ModeSetuid)
	}
	if err != nil {
		t.Fatal(err)
	}
	// What the agent was left open by who started it is not for Pods.
	left, err := unix.Open(os.DevNull, unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(left)
	c := newCluster(t, func(o *runner.Options) { o.Hide = []string{filepath.Dir(o.StateDir)} })
	var pods []*corev1.Pod
	for _, a := range securityContexts {
		pods = append(pods, c.attack(a.level, func(p *corev1.Pod) {
			main := &p.Spec.Containers[0]
			main.Command = []string{"sh", "-c", "exec 2>&1; " + a.script}
			main.SecurityContext = &corev1.SecurityContext{}
			a.ask(&p.Spec, main.SecurityContext)
		}))
	}
	for i, a := range securityContexts {
		out := c.outcome(pods[i])
		for _, want := range a.want {
			if !regexp.MustCompile(want).MatchString(out) {
				t.Errorf("%s (%s): no %q in:\n%s", a.name, a.level, want, out)
			}
		}
		if a.lacks != "" && regexp.MustCompile(a.lacks).MatchString(out) {
			t.Errorf("%s (%s): %q in:\n%s", a.name, a.level, a.lacks, out)
		}
		if p := c.again(pods[i]); (p.Status.Phase == corev1.PodPending) != a.waits {
			t.Errorf("%s (%s): the phase is %s", a.name, a.level, p.Status.Phase)
		}
	}
}

func (c *cluster) again(p *corev1.Pod) *corev1.Pod {
	c.t.Helper()
	got, err := c.client.CoreV1().Pods(p.Namespace).Get(c.t.Context(), p.Name, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return got
}

// Where the range of users is not within those of the agent, Pods that are not allowed to be privileged
// wait, the Node says so, and the others run.
func TestUsersNotMapped(t *testing.T) {
	armed(t)
	// The last number of all is no user, in no namespace.
	c := newCluster(t, func(o *runner.Options) { o.UIDs = runner.UIDRange{First: 1<<32 - 1<<17, Last: 1<<32 - 1} })
	const why = "is not within the users of the agent's own user namespace"
	if got := c.r.Confinement(); got.Status != corev1.ConditionFalse || got.Reason != "UsersNotMapped" || !strings.Contains(got.Message, why) {
		t.Errorf("the condition is %+v", got)
	}
	run := func(level string) string {
		return c.outcome(c.attack(level, func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"echo", "it runs"} }))
	}
	if out := run("baseline"); !strings.Contains(out, why) {
		t.Errorf("a Pod of level baseline: %q", out)
	}
	if out := run("privileged"); !strings.Contains(out, "it runs") {
		t.Errorf("a Pod of level privileged: %q", out)
	}
}

// outcome waits for a Pod that ends or is not started, and returns what it wrote, or
// why it waits.
func (c *cluster) outcome(p *corev1.Pod) string {
	c.t.Helper()
	out := ""
	await(c.t, "the end of "+p.Name, func() bool {
		got := c.again(p)
		if len(got.Status.ContainerStatuses) == 0 {
			return false
		}
		st := got.Status.ContainerStatuses[0].State
		switch {
		case st.Waiting != nil && st.Waiting.Reason == "CreateContainerConfigError":
			out = st.Waiting.Message
		case st.Terminated != nil && st.Terminated.Reason == "StartError":
			out = "not started: " + st.Terminated.Message
		case st.Terminated != nil:
			out = c.output(got)
		}
		return out != ""
	})
	return out
}

// output is what the container wrote, without the times of its log.
func (c *cluster) output(p *corev1.Pod) string {
	return logLine.ReplaceAllString(c.logOf(p, 0), "")
}

var logLine = regexp.MustCompile(`(?m)^\S+ std(?:out|err) [FP] `)
