package runner_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/systemd"
	"github.com/fairlead/fairlead/internal/testbed"
	booted "github.com/fairlead/fairlead/internal/testbed/systemd"
)

// registered is the Pod of a program that listens on a port of this machine.
func registered(t *testing.T, name string, port int, change func(*registration.Spec)) *corev1.Pod {
	t.Helper()
	s := registration.Spec{
		Name: name, Namespace: "default", Node: nodeName, Labels: map[string]string{"app": name}, Ports: []string{fmt.Sprintf("tcp=%d", port)},
	}
	if change != nil {
		change(&s)
	}
	p, err := s.Pod()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// listener is a program that listens, which the test opens and closes.
func listener(t *testing.T, port int) *net.TCPListener {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.(*net.TCPListener)
}

func isUnready(p *corev1.Pod) bool { return len(p.Status.Conditions) > 0 && !isReady(p) }

// A registered program is ready while its check passes, whoever started it, and with an
// agent that ends and comes back; deleting the Pod does not end it.
func TestRegistered(t *testing.T) {
	c := newCluster(t, nil)
	l := listener(t, 0)
	port := l.Addr().(*net.TCPAddr).Port
	name := "redis-" + nodeName
	c.create(registered(t, "redis", port, nil))
	p := c.ready(name)
	if st := p.Status; st.PodIP != "127.0.0.1" || st.HostIP != "127.0.0.1" || st.Phase != corev1.PodRunning || st.Reason != "Registered" {
		t.Errorf("status %+v", st)
	}
	_ = l.Close()
	c.until(name, "unready", isUnready)
	l = listener(t, port)
	before := c.ready(name)

	c.stop()
	watch, err := c.client.CoreV1().Pods("default").Watch(t.Context(),
		metav1.ListOptions{FieldSelector: "metadata.name=" + name, ResourceVersion: before.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	c.start()
	_ = l.Close() // only an agent that checks sees it
	c.until(name, "unready", isUnready)
	for e := range watch.ResultChan() {
		if p, ok := e.Object.(*corev1.Pod); ok && isUnready(p) {
			break // the first change that the new agent has written
		} else if ok && !isReady(p) {
			t.Errorf("without a status in between: %+v", p.Status)
		}
	}
	listener(t, port)
	c.ready(name)

	c.delete(name, metav1.DeleteOptions{})
	c.untilGone(name)
	conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		t.Fatalf("the program ended with its Pod: %v", err)
	}
	_ = conn.Close()
}

// A registered program that a drain has evicted is no endpoint, also for the next agent, until its node is uncordoned. A
// later cordon leaves it as it is.
func TestEvictedProgramReturns(t *testing.T) {
	c := newCluster(t, nil)
	name := "drained-" + nodeName
	cordon := func(on bool) {
		t.Helper()
		patch := fmt.Appendf(nil, `{"spec":{"unschedulable":%v}}`, on)
		if _, err := c.client.CoreV1().Nodes().Patch(t.Context(), nodeName, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	c.create(registered(t, "drained", listener(t, 0).Addr().(*net.TCPAddr).Port, nil))
	before := c.ready(name)
	cordon(true)
	if err := c.client.CoreV1().Pods("default").EvictV1(t.Context(), &policyv1.Eviction{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
	}); err != nil {
		t.Fatal(err)
	}
	out := func(p *corev1.Pod) bool {
		return p.UID != before.UID && isUnready(p) && status(p).State.Waiting != nil && status(p).State.Waiting.Reason == "Evicted"
	}
	p := c.until(name, "out of its Services", out)
	if m := status(p).State.Waiting.Message; !strings.Contains(m, "kubectl uncordon "+nodeName) {
		t.Errorf("the message is %q", m)
	}
	// again has another agent follow the Pods.
	again := func(other string) {
		t.Helper()
		c.stop()
		c.start()
		c.create(registered(t, other, listener(t, 0).Addr().(*net.TCPAddr).Port, nil))
		c.ready(other + "-" + nodeName)
	}
	again("second")
	if p := c.get(name); !out(p) {
		t.Errorf("the next agent has brought it back: %+v", p.Status)
	}
	cordon(false)
	back := c.ready(name)
	cordon(true)
	again("third")
	if p := c.get(name); !isReady(p) || p.UID != back.UID {
		t.Errorf("a cordon has taken it out: %+v", p.Status)
	}
}

// A status of an earlier boot says nothing about now.
func TestRegisteredBeforeTheMachineStarted(t *testing.T) {
	c := newCluster(t, nil)
	l := listener(t, 0)
	name := "db-" + nodeName
	c.create(registered(t, "db", l.Addr().(*net.TCPAddr).Port, nil))
	p := c.ready(name)
	c.stop()
	_ = l.Close()
	id := p.Status.ContainerStatuses[0].ContainerID
	patch := fmt.Sprintf(`{"status":{"containerStatuses":[{"name":"program","containerID":%q}]}}`, id[:len(id)-1]+"?")
	if _, err := c.client.CoreV1().Pods("default").Patch(t.Context(), name, types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	c.start()
	first := c.until(name, "written by this agent", func(p *corev1.Pod) bool { return p.Status.ContainerStatuses[0].ContainerID == id })
	if isReady(first) {
		t.Error("ready by what was known before the machine started")
	}
}

// A program known by a file with its process ID is unready without it, and ready with
// another process in the file.
func TestRegisteredByPIDFile(t *testing.T) {
	c := newCluster(t, nil)
	file := filepath.Join(t.TempDir(), "db.pid")
	start := func() *exec.Cmd {
		cmd := exec.Command("sleep", "600")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		if err := os.WriteFile(file, []byte(strconv.Itoa(cmd.Process.Pid)+"\nmore\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	name := "db-" + nodeName
	c.create(registered(t, "db", 5432, func(s *registration.Spec) { s.PIDFile = file }))
	c.until(name, "without a process", func(p *corev1.Pod) bool {
		return isUnready(p) && status(p).State.Waiting != nil && status(p).State.Waiting.Reason == "ProcessNotFound"
	})
	cmd := start()
	c.ready(name)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	c.until(name, "unready", isUnready) // a zombie: it has not been waited for
	start()
	p := c.until(name, "back", isReady)
	if n := status(p).RestartCount; n != 1 {
		t.Errorf("%d restarts, want 1", n)
	}
}

// The check may be a command of the machine.
func TestRegisteredWithACommand(t *testing.T) {
	c := newCluster(t, nil)
	role := filepath.Join(t.TempDir(), "role")
	name := "pg-" + nodeName
	c.create(registered(t, "pg", 5432, func(s *registration.Spec) { s.Ready = "exec:grep -q primary " + role }))
	c.until(name, "unready", isUnready)
	if err := os.WriteFile(role, []byte("primary"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.ready(name)
	if err := os.WriteFile(role, []byte("standby"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.until(name, "unready", isUnready)
}

// A command that needs over a second fails by default, and not with a longer limit.
func TestRegisteredWithASlowCommand(t *testing.T) {
	c := newCluster(t, nil)
	c.create(registered(t, "hasty", 5432, func(s *registration.Spec) { s.Ready = "exec:sleep 1.2" }))
	c.create(registered(t, "patient", 5433, func(s *registration.Spec) { s.Ready, s.ReadyTimeout = "exec:sleep 1.2", "60s" }))
	c.ready("patient-" + nodeName)
	c.until("hasty-"+nodeName, "unready", isUnready)
}

// With a real systemd: a program is ready while its unit is active, and its check passes.
func TestRegisteredUnit(t *testing.T) {
	m := booted.Boot(t, map[string]string{"db.service": "ExecStart=sleep 600"})
	m.Systemctl("start", "db.service")
	c := newCluster(t, nil)
	l := listener(t, 0)
	name := "db-" + nodeName
	p := registered(t, "db", l.Addr().(*net.TCPAddr).Port, func(s *registration.Spec) {
		s.Unit, s.Ready = "db", "tcp://:"+strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	})
	c.create(p)
	c.ready(name)
	for _, x := range []struct{ verb, reason string }{{"kill", "UnitFailed"}, {"stop", "UnitInactive"}} {
		begin := time.Now()
		if x.verb == "kill" {
			m.Systemctl("kill", "--signal=KILL", "db.service")
		} else {
			m.Systemctl(x.verb, "db.service")
		}
		c.until(name, "unready because of its unit", func(p *corev1.Pod) bool {
			return isUnready(p) && status(p).State.Waiting != nil && status(p).State.Waiting.Reason == x.reason
		})
		t.Logf("%s: unready after %v, systemctl itself included", x.verb, time.Since(begin).Round(time.Millisecond))
		m.Systemctl("start", "db.service")
		c.ready(name)
	}
	_ = l.Close() // its check fails, though the unit is active
	c.until(name, "unready because of its check", func(p *corev1.Pod) bool { return isUnready(p) && status(p).State.Running != nil })
}

// The hook of a unit that a Service selects waits until the nodes have taken the program out,
// also when the agent ends before that; the answer to another stop does not count.
func TestStopOfARegisteredUnit(t *testing.T) {
	m := booted.Boot(t, map[string]string{"db.service": "ExecStart=sleep 600"})
	testbed.Until(t, "the hook", func() error { return systemd.InstallHook(t.Context(), "db.service", 10*time.Minute) })
	m.Systemctl("start", "db.service")
	c := newCluster(t, nil)
	services := c.client.CoreV1().Services("default")
	if _, err := services.Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "stops"},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "db"}, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = services.Delete(context.Background(), "stops", metav1.DeleteOptions{}) })
	name := "db-" + nodeName
	c.create(registered(t, "db", 5432, func(s *registration.Spec) { s.Unit, s.Ready = "db", "none" }))
	c.ready(name)
	answer := func(message string) {
		t.Helper()
		patch := fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"status":"True","message":%q}]}}`, barrier.Drained, message)
		if _, err := c.client.CoreV1().Pods("default").Patch(t.Context(), name, types.StrategicMergePatchType, []byte(patch),
			metav1.PatchOptions{}, "status"); err != nil {
			t.Fatal(err)
		}
	}
	drained := func(p *corev1.Pod) *corev1.PodCondition {
		i := slices.IndexFunc(p.Status.Conditions, func(k corev1.PodCondition) bool { return k.Type == barrier.Drained })
		if i < 0 {
			return nil
		}
		return &p.Status.Conditions[i]
	}
	question := func() string {
		t.Helper()
		p := c.until(name, "asked", func(p *corev1.Pod) bool {
			k := drained(p)
			return k != nil && k.Status == corev1.ConditionFalse && strings.HasPrefix(k.Message, "invocation ")
		})
		if isReady(p) {
			t.Error("it is ready while its unit is being stopped")
		}
		return drained(p).Message
	}
	stopped := func() {
		t.Helper()
		testbed.Until(t, "the unit's end", func() error {
			if state := m.Systemctl("show", "--property", "ActiveState", "--value", "db.service"); state != "inactive" {
				return errors.New(state)
			}
			return nil
		})
	}

	m.Systemctl("stop", "--no-block", "db.service")
	first := question()
	c.stop()
	c.start()
	answer(first)
	stopped()
	m.Systemctl("start", "db.service")
	c.until(name, "up again", func(p *corev1.Pod) bool { return isReady(p) && drained(p) == nil })

	m.Systemctl("stop", "--no-block", "db.service")
	second := question()
	answer(first)
	if again := question(); again != second || again == first {
		t.Errorf("asked %q, then %q and %q", first, second, again)
	}
	testbed.Until(t, "the end of the hook's time", func() error {
		if all := c.events(name); !strings.Contains(all, "NotDrained") {
			return errors.New(all)
		}
		return nil
	})
	answer(second)
	stopped()

	m.Systemctl("start", "db.service")
	c.ready(name)
	if err := services.Delete(t.Context(), "stops", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	m.Systemctl("stop", "--no-block", "db.service") // no node sends it anything
	stopped()
	c.delete(name, metav1.DeleteOptions{})
	c.untilGone(name)
	testbed.Until(t, "no file to be left", func() error {
		left, err := filepath.Glob("/run/fairlead/released/*")
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%v", left)
		}
		return err
	})
}
