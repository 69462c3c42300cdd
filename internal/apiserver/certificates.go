package apiserver

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/apiserver/rotation"
)

// CertificatesPath is where a server answers with a CertificatesStatus (GET), and where it is asked by the
// parameter "do" (POST) to "renew" certificates of its own (parameters "name") or to take a step of the rotation of
// the authority: "begin", "finish" or "abort"; with the parameter "force" it does not wait for those that have not reported.
const CertificatesPath = "/fairlead/certificates"

// CertificatesStatus is what a server knows of the certificates of its cluster.
type CertificatesStatus struct {
	Server       string            `json:"server"`
	Authorities  []pki.File        `json:"authorities"` // the first one signs
	Certificates []pki.File        `json:"certificates"`
	Others       []CertificateHeld `json:"others"`
	Rotation     rotation.Status   `json:"rotation"`
}

// CertificateHeld is the certificate of a node or another server, as that reports it.
type CertificateHeld struct {
	Holder string `json:"holder"`
	// Report is empty if the holder does not report.
	pki.Report
}

// seenWithin is how long a user with a certificate of an authority that goes keeps that from being removed: twice the
// time after which clients look for new certificate files.
func (c *credentials) seenWithin() time.Duration { return min(time.Minute, c.pki.Life/5) }

// certReport is what this server says about its certificates to the other servers.
func (s *Server) certReport() pki.Report {
	r := s.creds.reported()
	if s.peering != nil {
		r.Peers = *s.peering.trusted.Load()
	}
	r.Seen, r.SeenPartial = s.creds.clients.since(time.Now().Add(-s.creds.seenWithin()))
	return r
}

// certificates answers at CertificatesPath.
type certificates struct {
	creds    *credentials
	self     string
	rotation *rotation.Rotation

	authorizer authorizer.Authorizer
}

func (s *Server) newCertificates(
	client kubernetes.Interface, nodes corelisters.NodeLister, keeper *endpointKeeper, g *guard, store *etcd,
) *certificates {
	named := func(server string) string { return "server " + strings.TrimPrefix(server, "https://") }
	self := named(s.publicURL())
	o := rotation.Options{
		Client: client, PKI: s.creds.pki, Nodes: nodes, Self: self, Report: s.certReport, Servers: keeper.others, Log: s.log,
		Changed: func(ctx context.Context) error {
			err := s.creds.refresh()
			g.keeper.Refresh()
			return errors.Join(err, s.ensureCluster(ctx, client), s.ensureToken(ctx, client),
				keeper.renew(ctx)) // with the new report
		},
	}
	if s.peering != nil {
		o.Members = func() (out []string) {
			for _, server := range s.peering.servers(store.embedded.server()) {
				out = append(out, named(server))
			}
			return out
		}
		o.Restart = func(ctx context.Context, first []string) error {
			err := store.embedded.restart(ctx, func(server string) bool { return slices.Contains(first, named(server)) })
			if err != nil {
				return err
			}
			return keeper.renew(ctx) // with the new report
		}
	}
	return &certificates{s.creds, self, rotation.New(o), g.authorizer}
}

// ServeHTTP answers the requests of CertificatesPath.
func (c *certificates) ServeHTTP(w http.ResponseWriter, r *http.Request) {
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

func (c *certificates) do(r *http.Request) error {
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

func (c *certificates) status(ctx context.Context) (*CertificatesStatus, error) {
	out := &CertificatesStatus{Server: c.self, Others: []CertificateHeld{}}
	var err error
	if out.Authorities, out.Certificates, err = pki.List(c.creds.dir.file("pki")); err != nil {
		return nil, err
	}
	reports, err := c.rotation.Reports(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(reports)) {
		if name != c.self {
			out.Others = append(out.Others, CertificateHeld{name, reports[name]})
		}
	}
	out.Rotation, err = c.rotation.Status(ctx)
	return out, err
}
