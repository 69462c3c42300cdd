package apiserver_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/logutil"
	"go.uber.org/zap/zapcore"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// logBuffer is a log that is read while it is written.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// A request that is answered 504 is in the log once, at WARN; one whose client has gone
// is not.
func TestTimeoutsAreLogged(t *testing.T) {
	t.Parallel()
	var log logBuffer
	s := apiservertest.StartServer(t, func(o *apiserver.Options) {
		o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	})
	client, err := rest.HTTPClientFor(s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	// post sends half a body, so that the server waits.
	post := func(ctx context.Context, query string) (int, error) {
		body, w := io.Pipe()
		defer w.Close()
		go io.WriteString(w, `{"apiVersion":"v1","kind":"ConfigMap",`)
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/api/v1/namespaces/default/configmaps?"+query, body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		if err != nil {
			return 0, err
		}
		resp.Body.Close()
		return resp.StatusCode, nil
	}
	gone, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if code, err := post(gone, "of=one-that-goes&timeout=20s"); err == nil {
		t.Errorf("a request whose client goes was answered with %d", code)
	}
	if code, err := post(t.Context(), "timeout=1s"); err != nil || code != http.StatusGatewayTimeout {
		t.Fatalf("a request that takes too long: %d, %v", code, err)
	}
	const line = `level=WARN msg="a request was not answered in time" method=POST path=/api/v1/namespaces/default/configmaps`
	if text := log.String(); strings.Count(text, line) != 1 || strings.Count(text, "not answered") != 1 {
		t.Errorf("the log is %q", text)
	}
}

// The messages of etcd's clients go to the server's log, at level debug, and nowhere else: to that of the last
// server of a process, so that no other test may start one meanwhile.
func TestLogOfEtcdClients(t *testing.T) {
	var log logBuffer
	s, err := apiserver.New(apiserver.Options{
		DataDir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	// As k8s.io/apiserver makes its logger.
	client, err := logutil.CreateDefaultZapLogger(zapcore.InfoLevel)
	if err != nil {
		t.Fatal(err)
	}
	client.Named("etcd-client").Warn("retrying of unary invoker failed")
	if text := log.String(); !strings.Contains(text, `level=DEBUG msg="retrying of unary invoker failed" component=etcd-client`) {
		t.Errorf("the log is %q", text)
	}
	// Which it does later than package clientlog changes the configuration.
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	trace, err := cmd.CombinedOutput()
	_, after, changed := strings.Cut(string(trace), "internal/apiserver/clientlog @")
	if err != nil || !changed || !strings.Contains(after, "k8s.io/apiserver/pkg/storage/storagebackend/factory @") {
		t.Errorf("the order of initialization, %v:\n%s", err, trace)
	}
}
