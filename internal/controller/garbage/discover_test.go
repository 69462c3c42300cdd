package garbage

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/controller/kit"
)

// silent is an API server that does not answer, as one that has lost its store.
type silent struct{}

func (silent) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// The end of a controller ends its questions about the kinds that are served: a server that has lost its store waited for them one
// after the other, half a minute each.
func TestEndWhileTheServerIsSilent(t *testing.T) {
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "https://192.0.2.1", Transport: silent{}})
	if err != nil {
		t.Fatal(err)
	}
	objects, err := metadata.NewForConfig(&rest.Config{Host: "https://192.0.2.1", Transport: silent{}})
	if err != nil {
		t.Fatal(err)
	}
	k := &kit.Kit{Client: client}
	for name, ask := range map[string]func(context.Context) error{
		"the watches": func(ctx context.Context) error { return (&garbage{Kit: k}).discover(ctx, nil, nil, nil) },
		"a namespace": func(ctx context.Context) error {
			return errors.Join((&namespaces{Kit: k, meta: objects}).empty(ctx, "a").errs...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				begin := time.Now()
				if err := ask(ctx); err == nil {
					t.Error("no error")
				}
				if took := time.Since(begin); took > 2*time.Second {
					t.Errorf("it took %s after the end", took)
				}
			})
		})
	}
}
