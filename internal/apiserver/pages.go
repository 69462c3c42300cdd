package apiserver

import (
	"errors"
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/endpoints/request"
	restclient "k8s.io/client-go/rest"
)

// static answers at the paths of files, and below them, before a request is authenticated; h answers all others.
func static(h http.Handler, files map[string]http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for path, of := range files {
			if r.URL.Path == path || strings.HasPrefix(r.URL.Path, path+"/") {
				of.ServeHTTP(w, r)
				return
			}
		}
		h.ServeHTTP(w, r)
	})
}

// actAs returns the configuration of a client in this process that acts as the user of a request: each of its requests is
// authorized, and audited, as one of that user.
func (a *assembly) actAs(r *http.Request) (*restclient.Config, error) {
	u, ok := request.UserFrom(r.Context())
	if !ok || u.GetName() == "" {
		return nil, errors.New("the request has no user")
	}
	c := a.LoopbackConfig()
	c.UserAgent = "fairlead/questions"
	c.DisableCompression = true // in this process it costs more than the bytes that it saves
	c.Impersonate = restclient.ImpersonationConfig{UserName: u.GetName(), UID: u.GetUID(), Groups: u.GetGroups(), Extra: u.GetExtra()}
	return c, nil
}
