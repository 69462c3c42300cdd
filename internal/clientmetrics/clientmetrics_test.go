package clientmetrics

import (
	"net/http"
	"net/http/httptest"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// A request of client-go is counted, by method and code, and nothing else is gathered.
func TestRequestsAreCounted(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusTeapot) }))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Nodes().Get(t.Context(), "a", metav1.GetOptions{}); err == nil {
		t.Fatal("no error")
	}
	all, err := Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	counted := false
	for _, f := range all {
		if f.GetName() == "go_goroutines" {
			t.Error("metrics of the Go runtime are gathered, too")
		}
		if f.GetName() != "rest_client_requests_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			counted = counted || labels["code"] == "418" && labels["method"] == "GET" && m.GetCounter().GetValue() == 1
		}
	}
	if !counted {
		t.Errorf("the request is not counted: %v", all)
	}
}
