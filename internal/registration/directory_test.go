package registration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// lines is a log.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// What the files of a directory describe is registered: additions, edits and removals
// follow, and a file that cannot be used leaves what it said before.
func TestDirectory(t *testing.T) {
	client := kubernetes.NewForConfigOrDie(process.API(t))
	pods := client.CoreV1().Pods("default")
	dir, log := filepath.Join(t.TempDir(), "services.d"), &lines{}
	d := &registration.Directory{Path: dir, Node: "n1", Client: client, Log: slog.New(slog.NewTextHandler(log, nil))}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	defer func() {
		cancel()
		<-ended
	}()
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		path := filepath.Join(dir, name)
		aside := path + ".new" // the umask may take from the mode, and a file that comes later has all of it
		if err := errors.Join(os.WriteFile(aside, []byte(text), mode), os.Chmod(aside, mode), os.Rename(aside, path)); err != nil {
			t.Fatal(err)
		}
	}
	port := func(name string) int32 {
		p, err := pods.Get(t.Context(), name+"-n1", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return 0
		}
		if err != nil {
			t.Fatal(err)
		}
		return p.Spec.Containers[0].Ports[0].ContainerPort
	}
	until := func(name string, want int32) {
		t.Helper()
		testbed.Until(t, fmt.Sprintf("%s at port %d", name, want), func() error {
			if got := port(name); got != want {
				return fmt.Errorf("it is %d\n%s", got, log)
			}
			return nil
		})
	}
	logged := func(want string) {
		t.Helper()
		testbed.Until(t, "the log to say "+want, func() error {
			if !strings.Contains(log.String(), want) {
				return errors.New(log.String())
			}
			return nil
		})
	}
	byHand := registration.Spec{Name: "hand", Namespace: "default", Node: "n1", Ports: []string{"1"}}
	hand, err := byHand.Pod()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := registration.Write(t.Context(), client, hand); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil { // after the start
		t.Fatal(err)
	}
	write("a.yaml", "name: a\nports: [10]\n---\nname: b\nports: [20]", 0o644)
	write("ignored.yaml~", "name: c\nports: [30]", 0o644)
	until("a", 10)
	until("b", 20)
	write("a.yaml", "name: a\nports: [11]", 0o600)
	until("a", 11)
	until("b", 0)

	write("a.yaml", "name: a\nport: 12", 0o644)
	logged(dir + "/a.yaml:2: port: no such field")
	write("open.yaml", "name: open\nports: [40]", 0o666)
	logged("group and others must not be able to write to it")
	write("z.yaml", "name: a\nports: [50]\n---\nname: z\nports: [60]", 0o644)
	logged("z.yaml: name: a is in " + dir + "/a.yaml as well")
	until("z", 60)
	if port("a") != 11 || port("open") != 0 {
		t.Errorf("a is at %d, open at %d; want 11 and none", port("a"), port("open"))
	}

	// One that was deleted in the API comes back with the next change of any file.
	if err := pods.Delete(t.Context(), "z-n1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	write("hand.yaml", "name: hand\nports: [2]", 0o644)
	logged("it is registered already, by 'fairlead register': remove that first")
	until("z", 60)
	if err := os.Remove(filepath.Join(dir, "z.yaml")); err != nil {
		t.Fatal(err)
	}
	until("z", 0)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	until("a", 0)
	list, err := pods.List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || list.Items[0].Name != "hand-n1" {
		t.Errorf("left are %v, %v; want what the files are not about", names(list), err)
	}
}

// A node without files asks the API until nothing of earlier ones is left, and no more.
func TestDirectoryIdle(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "services.d")
	earlier := registration.Spec{Name: "a", Namespace: "default", Node: "n1", Ports: []string{"1"}, File: "/elsewhere/a.yaml"}
	pod, err := earlier.Pod()
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(pod)
		d := &registration.Directory{Path: missing, Node: "n1", Client: client, Log: slog.New(slog.DiscardHandler)}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := d.Run(ctx); err != nil {
			t.Fatal(err)
		}
		var verbs []string
		for _, a := range client.Actions() {
			verbs = append(verbs, a.GetVerb())
		}
		if got, want := strings.Join(verbs, " "), "list delete list"; got != want {
			t.Errorf("requests in a minute: %q, want %q", got, want)
		}
	})
}

func names(list *corev1.PodList) (out []string) {
	for i := range list.Items {
		out = append(out, list.Items[i].Name)
	}
	return out
}
