package apiserver_test

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// A user whose watches are not read gets no further ones when 32 MiB wait, long before the time in which they end. The
// number of watches of a user is limited, too. Both are 429, and others watch on.
func TestWatchesOfAUserAreBounded(t *testing.T) {
	t.Parallel()
	const limit = 60
	cfg := apiservertest.Start(t, func(o *apiserver.Options) { o.MaxWatchesPerUser = limit })
	c := kubernetes.NewForConfigOrDie(cfg)
	_ = tenant(t, cfg)
	if _, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), large("big", 1), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(cfg.Host)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(cfg.CAData)
	// watch returns the status of the answer, of which the body is not read.
	watch := func(user string) int {
		conn, err := tls.Dial("tcp", u.Host, &tls.Config{RootCAs: roots, ServerName: cfg.ServerName})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		fmt.Fprintf(conn, "GET /api/v1/namespaces/default/configmaps?watch=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\n",
			cfg.BearerToken, user)
		r, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), nil)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode
	}
	const asTenant = "Impersonate-User: tenant\r\nImpersonate-Group: system:authenticated\r\n"
	before := heap()
	begun := 0
	for ; begun < limit; begun++ {
		if code := watch(asTenant); code != http.StatusOK {
			if code != http.StatusTooManyRequests {
				t.Errorf("watch %d: %d", begun, code)
			}
			break
		}
	}
	if grown := heap() - before; begun < 20 || begun == limit || grown > 200<<20 {
		t.Errorf("%d watches were begun, with %d MiB", begun, grown>>20)
	} else {
		t.Logf("%d watches of 1 MB were begun, with %d MiB", begun, grown>>20)
	}
	w, err := c.CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Errorf("another user: %v", err)
	} else {
		w.Stop()
	}
	for i := range limit + 2 {
		if code := watch(""); code != http.StatusOK {
			t.Fatalf("watch %d of the server's own user: %d", i, code)
		}
	}
}

// Selectors of more than 16 KB are rejected before they are parsed, also by watches and deletions; shorter ones are not.
func TestLongSelectors(t *testing.T) {
	t.Parallel()
	c := kubernetes.NewForConfigOrDie(apiservertest.Start(t))
	selector := func(bytes int) string { return "a in (" + strings.Repeat("x,", (bytes-8)/2) + "x)" }
	maps := c.CoreV1().ConfigMaps("default")
	long := metav1.ListOptions{LabelSelector: selector(20 << 10)}
	_, listErr := maps.List(t.Context(), long)
	_, watchErr := maps.Watch(t.Context(), long)
	_, fieldErr := maps.List(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + strings.Repeat("x", 20<<10)})
	for what, err := range map[string]error{
		"list": listErr, "watch": watchErr, "fields": fieldErr, "delete": maps.DeleteCollection(t.Context(), metav1.DeleteOptions{}, long),
	} {
		if !apierrors.IsRequestEntityTooLargeError(err) || !strings.Contains(err.Error(), "want at most 16384") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := maps.List(t.Context(), metav1.ListOptions{LabelSelector: selector(16 << 10)}); err != nil {
		t.Errorf("a selector of 16 KB: %v", err)
	}
}
