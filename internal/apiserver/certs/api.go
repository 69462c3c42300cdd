package certs

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/apiserver/rotation"
)

// Path is where a server answers with a Status (GET), and where it is asked by the
// parameter "do" (POST) to "renew" its certificates (parameters "name") or to take a step of the rotation of
// the authority: "begin", "finish" or "abort"; with the parameter "force" it does not wait for holders that have not reported.
const Path = "/fairlead/certificates"

// Status is what a server knows of the certificates of its cluster.
type Status struct {
	Server       string          `json:"server"`
	Authorities  []pki.File      `json:"authorities"` // the first one signs
	Certificates []pki.File      `json:"certificates"`
	Others       []Held          `json:"others"`
	Rotation     rotation.Status `json:"rotation"`
}

// Held is the certificate of a node or another server, as that reports it.
type Held struct {
	Holder string `json:"holder"`
	// Report is empty if the holder does not report.
	pki.Report
}

// seenWithin is how long a user with a certificate of an authority that goes keeps that from being removed: twice the
// time after which clients look for new certificate files.
func (c *Credentials) seenWithin() time.Duration { return min(time.Minute, c.PKI.Life/5) }

// API answers at Path.
type API struct {
	creds    *Credentials
	self     string
	rotation *rotation.Rotation

	authorizer authorizer.Authorizer
}

// NewAPI returns the API of the certificates of the server self.
func NewAPI(creds *Credentials, self string, r *rotation.Rotation, a authorizer.Authorizer) *API {
	return &API{creds, self, r, a}
}

// ServeHTTP answers the requests of Path.
func (c *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var answer any
	var err error
	switch r.Method {
	case http.MethodGet:
		answer, err = c.status(r.Context())
	case http.MethodPost:
		answer = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess}
		err = c.do(r)
	default:
		err = apierrors.NewMethodNotSupported(metav1.SchemeGroupVersion.WithResource("certificates").GroupResource(), r.Method)
	}
	var known apierrors.APIStatus
	if err != nil && !errors.As(err, &known) {
		err = members.Conflict("%s", err)
	}
	members.Reply(w, answer, err)
}

func (c *API) do(r *http.Request) error {
	ctx, q := r.Context(), r.URL.Query()
	if err := members.MayAdminister(ctx, c.authorizer); err != nil {
		return err
	}
	force := q.Has("force")
	switch what := q.Get("do"); what {
	case "renew":
		return c.creds.renew(q["name"])
	case "begin":
		return c.rotation.Begin(ctx, force)
	case "finish":
		return c.rotation.Finish(ctx, force)
	case "abort":
		return c.rotation.Abort(ctx)
	default:
		return apierrors.NewBadRequest("do is " + what + "; want renew, begin, finish or abort")
	}
}

func (c *API) status(ctx context.Context) (*Status, error) {
	out := &Status{Server: c.self, Others: []Held{}}
	var err error
	if out.Authorities, out.Certificates, err = pki.List(c.creds.file("pki")); err != nil {
		return nil, err
	}
	reports, err := c.rotation.Reports(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(reports)) {
		if name != c.self {
			out.Others = append(out.Others, Held{name, reports[name]})
		}
	}
	out.Rotation, err = c.rotation.Status(ctx)
	return out, err
}
