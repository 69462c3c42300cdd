package guest_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

const (
	serverEnv = "FAIRLEAD_GUEST_SERVER"
	// virtualEnv is set where time is counted in instructions of the guest: only there can times be judged.
	virtualEnv = "FAIRLEAD_GUEST_VIRTUAL_TIME"
	serverFile = "server"
	serverPort = 8080
)

// linkServer gives the guest this program, which is the server of a Service there.
func linkServer(dir string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	return os.Link(exe, filepath.Join(dir, serverFile))
}

// answer sends back what comes, connection by connection.
func answer() {
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", serverPort))
	if err != nil {
		panic(err)
	}
	for {
		c, err := l.Accept()
		if err != nil {
			panic(err)
		}
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, c)
		}()
	}
}

// hogs take what they can get of processes, memory and disk, and never give up. They begin when all containers run: beside
// a hog a container takes seconds to start. The bomb waits for the others, which could not start any more.
//
// They wait without other processes: a guest needs long to start one.
var hogs = map[string]string{
	"forks":  hog("forks", "", "memory-on", "disk-on") + `for (;;) { fork }'`,
	"memory": hog("memory", "memory-on", "forks", "disk") + `for (;;) { my $x = "x" x 20_000_000 }'`,
	"disk": hog("disk", "disk-on", "forks", "memory") +
		`$b = "x" x 1_000_000; for (;;) { open $f, ">", "/tmp/fill"; 1 while syswrite $f, $b }'`,
}

// hog begins a script that makes a file, waits for others, makes another file, and goes on in perl.
func hog(first, second string, others ...string) string {
	var wait []string
	for _, o := range others {
		wait = append(wait, `-e "/mnt/`+o+`"`)
	}
	then := ""
	if second != "" {
		then = `open $g, ">", "/mnt/` + second + `"; `
	}
	return `exec perl -e 'open $f, ">", "/mnt/` + first + `"; ` +
		`select undef, undef, undef, 0.5 until ` + strings.Join(wait, " && ") + `; ` + then
}

// only is the one endpoint of a Service.
type only netip.AddrPort

func (o only) Pick(netip.Addr, []netip.AddrPort) (netip.AddrPort, bool) {
	return netip.AddrPort(o), false
}
func (only) Answered(netip.AddrPort)    {}
func (only) Failed(netip.AddrPort)      {}
func (only) Serves(netip.AddrPort) bool { return true }

// neighbours puts hogs of all kinds in one Pod beside the one of a Service: each request is
// answered, the hogs have the least share of the processor, and none gets beyond its limits
// or ends. The 99th percentiles of the requests' times are only judged in virtual time
// (bench's run hogs): another machine that others use lets the guest wait for as long as it
// likes.
func (m *machine) neighbours() {
	t := m.t
	t.Helper()
	m.pod("default", "server", "exec "+filepath.Join(uml.Shared, serverFile), nil, func(s *corev1.PodSpec) {
		c := &s.Containers[0]
		c.Env = []corev1.EnvVar{{Name: serverEnv, Value: "1"}}
		c.Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("500m")}
	})
	m.pod(namespace, "hogs", "", nil, func(s *corev1.PodSpec) {
		s.Containers = nil
		s.Volumes = []corev1.Volume{{Name: "both", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		for name, script := range hogs {
			s.Containers = append(s.Containers, corev1.Container{
				Name: name, Image: "host", Command: []string{"sh", "-c", script},
				VolumeMounts: []corev1.VolumeMount{{Name: "both", MountPath: "/mnt"}},
				Resources: corev1.ResourceRequirements{
					Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("200Mi")},
				},
			})
		}
	})
	server := m.until("default", "server", "running", running)
	m.weighs("fairlead/*"+string(server.UID), 59)
	e, err := relay.Start(relay.Config{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close(context.Background()) })
	l, err := e.Listen(svc.TCP, svc.IPv4, 0, only(netip.AddrPortFrom(netip.MustParseAddr(server.Status.PodIP), serverPort)))
	if err != nil {
		t.Fatal(err)
	}
	at := net.JoinHostPort("127.0.0.1", strconv.Itoa(int(l.Port)))
	for deadline := time.Now().Add(patience); ; <-time.After(pause) {
		if _, err := request(at); err == nil {
			break
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	requests, virtual := 100, os.Getenv(virtualEnv) != ""
	if virtual {
		requests = 2000
	} else {
		m.keepBusy()
	}

	pod := m.until(namespace, "hogs", "running", running)
	group := m.hogsAtWork(string(pod.UID))
	m.weighs("fairlead/*"+string(server.UID), 59)
	m.weighs("fairlead-unrequested", 50)
	begin := time.Now()
	m.freeze(group, true)
	alone := m.window(at, requests)
	m.freeze(group, false)
	beside := m.window(at, requests)
	t.Logf("99 of 100 requests take %v at most, %v beside hogs; measured in %v", alone, beside, time.Since(begin))
	if virtual && beside > 2*alone {
		t.Errorf("hogs make 99 of 100 requests take %v, from %v: more than double", beside, alone)
	}
	for _, s := range m.until(namespace, "hogs", "running", running).Status.ContainerStatuses {
		if s.State.Running == nil || s.RestartCount != 0 {
			t.Errorf("the container %s was not at work all the time: %+v", s.Name, s)
		}
	}
	m.delete(namespace, "hogs")
}

// keepBusy has the one processor of the guest busy until the test ends with what gives way to
// everything: the machine that runs the guest does not treat it otherwise with the hogs.
func (m *machine) keepBusy() {
	m.t.Helper()
	busy := exec.CommandContext(m.t.Context(), "chrt", "--idle", "0", "perl", "-e", "for (;;) {}")
	if err := busy.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		_ = busy.Process.Kill()
		_ = busy.Wait()
	})
}

// hogsAtWork waits until the Pod has as many processes as it can get, and returns its group. It
// seldom looks: a look takes long, and hogs have the least share of the processor.
func (m *machine) hogsAtWork(uid string) string {
	m.t.Helper()
	for deadline := time.Now().Add(patience); ; <-time.After(4 * pause) {
		found, _ := filepath.Glob(groups + "/fairlead-unrequested/*" + uid + "/pod")
		s, err := m.runner.Summary(m.t.Context())
		if err != nil {
			m.t.Fatal(err)
		}
		count := uint64(0)
		for _, p := range s.Pods {
			if p.PodRef.UID == uid && p.Processes != nil {
				count = p.Processes.ProcessCount
			}
		}
		if count > maxPIDs {
			m.t.Errorf("the bomb has %d processes, want %d at most", count, maxPIDs)
		}
		if len(found) == 1 && count >= maxPIDs-4 {
			return found[0]
		}
		if time.Now().After(deadline) {
			m.t.Fatalf("the hogs have %d processes, in %v", count, found)
		}
	}
}

// freeze stops the processes of a group, or lets them go on. The group may be a pattern.
func (m *machine) freeze(group string, on bool) {
	m.t.Helper()
	value := "0"
	if on {
		value = "1"
	}
	found, _ := filepath.Glob(group + "/cgroup.freeze")
	if len(found) != 1 {
		m.t.Fatalf("groups %s: %v", group, found)
	}
	if err := os.WriteFile(found[0], []byte(value), 0); err != nil {
		m.t.Fatal(err)
	}
}

// window sends requests for a while, and returns how long 99 of 100 take at most.
func (m *machine) window(at string, requests int) time.Duration {
	m.t.Helper()
	var all []time.Duration
	next := time.NewTicker(4 * time.Millisecond)
	defer next.Stop()
	for range requests {
		<-next.C
		d, err := request(at)
		if err != nil {
			m.t.Errorf("a request is lost: %v", err)
		}
		all = append(all, d)
	}
	slices.Sort(all)
	return all[requests*99/100-1]
}

// request is one connection that is asked once.
func request(at string) (time.Duration, error) {
	begin := time.Now()
	c, err := net.DialTimeout("tcp", at, patience/4)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	_ = c.SetDeadline(begin.Add(patience / 4))
	if _, err := c.Write([]byte("?")); err != nil {
		return 0, err
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return time.Since(begin), err
}
