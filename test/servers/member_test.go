package servers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	several "github.com/fairlead/fairlead/internal/apiserver/members"
	serverstore "github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// member is a server with an embedded etcd, on its own host.
type member struct {
	*process.Server
	host *testbed.Host
	name string
	dir  string
	// always are flags of every start.
	always []string
}

// newMember prepares a server that begins in an empty data directory.
func newMember(t *testing.T, n *testbed.Network, name string, flags ...string) *member {
	t.Helper()
	m := &member{host: n.Host(name), name: name, dir: filepath.Join(t.TempDir(), "data"), always: []string{"--controllers", "none"}}
	m.with(flags...)
	return m
}

// with sets the flags of the next start.
func (m *member) with(flags ...string) *member {
	if !slices.Contains(flags, "--bind-address") {
		flags = append(flags, "--bind-address", "127.0.0.1,"+m.host.Addr4().String())
	}
	if slices.Contains(flags, "--cluster-init") || slices.Contains(flags, "--join") || serverstore.IsMember(m.dir) {
		flags = append(flags, "--server-name", m.name) // rejected by one that is alone
	}
	m.Server = process.NewServer(m.host, process.Program("fairlead"), m.dir,
		slices.Concat([]string{"--audit-log-path", m.auditLog()}, m.always, flags)...)
	return m
}

// auditLog is the file of the server's audit log.
func (m *member) auditLog() string { return m.dir + "-audit.log" }

// at sets the data directory of the next start.
func (m *member) at(dir string) *member {
	m.dir = dir
	return m.with()
}

func (m *member) url() string { return "https://" + m.host.Addr4().String() + ":6443" }

// start starts the server and waits until it is ready.
func (m *member) start(t *testing.T) *member {
	t.Helper()
	m.Start(t)
	m.AwaitReady(t)
	return m
}

// run runs a command of an administrator on the server's host, and returns what it prints.
func (m *member) run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	cmd := m.host.Command(ctx, process.Program("fairlead"), append(args, "--data-dir", m.dir)...)
	cmd.Env = append(os.Environ(), "HOME="+m.dir, "KUBECONFIG=")
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	return string(out), err
}

func (m *member) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := m.run(t, args...)
	if err != nil {
		t.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
	return out
}

// token makes the token of a server, and returns the file with it.
func (m *member) token(t *testing.T, flags ...string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	text := m.must(t, append([]string{"token", "create", "--server"}, flags...)...)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// write writes a ConfigMap through the server.
func (m *member) write(t *testing.T, name string) error {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := m.Client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil // by a try whose answer was late
	}
	return err
}

// has waits until the server has the ConfigMap.
func (m *member) has(t *testing.T, name string) {
	t.Helper()
	testbed.Until(t, fmt.Sprintf("%s to have %s", m.name, name), func() error {
		_, err := m.Client.CoreV1().ConfigMaps("default").Get(t.Context(), name, metav1.GetOptions{})
		return err
	})
}

// list returns what 'fairlead server members' shows, by name.
func (m *member) list(t *testing.T, flags ...string) (map[string]several.Member, error) {
	t.Helper()
	text, err := m.run(t, append([]string{"server", "members", "-o", "json"}, flags...)...)
	if err != nil {
		return nil, err
	}
	var all []several.Member
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, err
	}
	out := map[string]several.Member{}
	for _, x := range all {
		out[x.Name] = x
	}
	return out, nil
}
