package runner_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/runner/shim"
)

// serveAsPod is this test's program inside a pod: an HTTP server on port 8080
// that answers with the address of the client.
func serveAsPod(mode string) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	if mode == "grpc" {
		s, state := grpc.NewServer(), health.NewServer()
		grpc_health_v1.RegisterHealthServer(s, state)
		if l, err := net.Listen("tcp", ":8080"); err == nil {
			go func() { _ = s.Serve(l) }()
		}
		// SIGUSR1 makes it ill.
		ill := make(chan os.Signal, 1)
		signal.Notify(ill, syscall.SIGUSR1)
		go func() {
			<-ill
			state.Shutdown()
		}()
		<-stop
		return
	}
	go func() {
		_ = http.ListenAndServe(":8080", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.RemoteAddr) }))
	}()
	<-stop
}

// record is what the shim wrote of an attempt of the container main.
func (c *cluster) record(p *corev1.Pod, attempt int) shim.State {
	c.t.Helper()
	path := filepath.Join(c.state, "pods", string(p.UID), "containers", "main", fmt.Sprintf("%d.json", attempt))
	var st shim.State
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &st)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return st
}
