package test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Ordinary use leaves nothing at level error in the log, and a start none at all:
// programs that end by themselves and by an interrupt in exec, ports forwarded to
// nothing, requests that are broken off, and an interrupt while all of that goes on. A
// program that is not there is named by run.
func TestLogsOfOrdinaryUse(t *testing.T) {
	u := newUser(t)
	p, _ := u.up()
	if log := p.Log(); strings.Contains(log, "level=") {
		t.Errorf("a start logs\n%s", log)
	}
	run := []string{"run", "-d", "--name", "web", "-p", "http=9376", "--", filepath.Join(u.dir, "backend")}
	process.Output(t, u.command("fairlead", run...))
	pod := process.Output(t, u.command("kubectl", "get", "pods", "-o", "name"))

	_, stderr, code := process.Result(t, u.command("fairlead", "run", "-d", "--name", "bad", "--", "/no/such/prog"))
	if code != 1 || !strings.Contains(stderr, "/no/such/prog: no such file or directory") {
		t.Errorf("a program that is not there: exit code %d, %q", code, stderr)
	}
	if _, stderr, code = process.Result(t, u.command("fairlead", "run", "--node", "nowhere", "--", "true")); code != 1 ||
		!strings.Contains(stderr, "there is no node nowhere") {
		t.Errorf("a node that is not there: exit code %d, %q", code, stderr)
	}

	for range 3 {
		process.Output(t, u.command("kubectl", "exec", pod, "--", "true"))
	}
	if _, _, code := process.Result(t, u.command("kubectl", "exec", pod, "--", "sh", "-c", "exit 3")); code != 3 {
		t.Errorf("exit code %d", code)
	}
	for _, signal := range []os.Signal{os.Interrupt, os.Kill} {
		exec := process.Start(t, u.command("kubectl", "exec", pod, "--", "sh", "-c", "echo started; sleep 600"))
		exec.Says("started")
		exec.Signal(signal)
		_ = exec.Wait() // by the signal
	}
	port := process.FreePort(t)
	forward := process.Start(t, u.command("kubectl", "port-forward", pod, fmt.Sprintf("%d:1", port)))
	forward.Says("Forwarding from")
	conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.SetDeadline(time.Now().Add(testbed.Patience)); err != nil {
		t.Fatal(err)
	}
	_, _ = conn.Write([]byte("GET / HTTP/1.0\r\n\r\n"))
	_, _ = io.ReadAll(conn) // until it is closed, by kubectl
	conn.Close()
	forward.Kill()
	u.breakOffRequests()

	// An interrupt while clients wait for more.
	follow := process.Start(t, u.command("kubectl", "logs", "-f", pod))
	follow.Says("listening")
	watch := process.Start(t, u.command("kubectl", "get", "pods", "-w"))
	watch.Says("web-")
	exec := process.Start(t, u.command("kubectl", "exec", pod, "--", "sh", "-c", "echo started; sleep 600"))
	exec.Says("started")
	p.Signal(os.Interrupt)
	if err := p.Wait(); err != nil {
		t.Errorf("fairlead up ended with %v", err)
	}
	for _, client := range []*process.Process{follow, watch, exec} {
		client.Kill()
	}
	for line := range strings.Lines(p.Log()) {
		if strings.Contains(line, "level=ERROR") {
			t.Errorf("logged: %.300s", line)
		}
	}
}

// breakOffRequests sends requests of which the client goes before the answer, or before
// they are whole.
func (u *user) breakOffRequests() {
	u.t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(u.dir, "state", "fairlead", "admin.kubeconfig"))
	if err != nil {
		u.t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cfg.CertData, cfg.KeyData)
	if err != nil {
		u.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(cfg.CAData)
	const body = `{"metadata":{"annotations":{"a":"b"}}}`
	for i := range 40 {
		// After the header alone, half of the body, or all of it.
		sent := []string{"", body[:10], body, body}[i%4]
		testbed.Until(u.t, "a connection", func() error {
			conn, err := tls.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(u.port)),
				&tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12})
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = fmt.Fprintf(conn, "PATCH /api/v1/namespaces/default HTTP/1.1\r\nHost: x\r\n"+
				"Content-Type: application/merge-patch+json\r\nContent-Length: %d\r\n\r\n%s", len(body), sent)
			return err
		})
	}
}
