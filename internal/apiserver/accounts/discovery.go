package accounts

import (
	"encoding/json"
	"net/http"
	"slices"

	jose "github.com/go-jose/go-jose/v4"
)

// Paths of the discovery documents.
const (
	ConfigurationPath = "/.well-known/openid-configuration"
	KeysPath          = "/openid/v1/jwks"
)

// Discovery returns the documents by path: the issuer's configuration and the keys
// that verify its tokens, the one that signs first, with the time of that key as Last-Modified. base is the URL of this server for others.
func (i *Issuer) Discovery(base string) map[string]http.Handler {
	keySet := document("application/jwk-set+json", func() (any, error) { return i.keySet() })
	return map[string]http.Handler{
		ConfigurationPath: document("application/json", func() (any, error) { return i.configuration(base), nil }),
		KeysPath: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Last-Modified", i.keys.Load().since.UTC().Format(http.TimeFormat))
			keySet.ServeHTTP(w, r)
		}),
	}
}

func (i *Issuer) configuration(base string) map[string]any {
	var used []string
	for _, k := range i.keys.Load().public {
		if a := string(algorithmOf(k)); !slices.Contains(used, a) {
			used = append(used, a)
		}
	}
	return map[string]any{
		"issuer": i.Name, "jwks_uri": base + KeysPath,
		"response_types_supported": []string{"id_token"}, "subject_types_supported": []string{"public"},
		"id_token_signing_alg_values_supported": used,
	}
}

func (i *Issuer) keySet() (any, error) {
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{}}
	for _, k := range i.keys.Load().public {
		id, err := keyID(k)
		if err != nil {
			return nil, err
		}
		set.Keys = append(set.Keys, jose.JSONWebKey{Key: k, KeyID: id, Use: "sig", Algorithm: string(algorithmOf(k))})
	}
	return set, nil
}

func document(kind string, content func() (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET is answered here", http.StatusMethodNotAllowed)
			return
		}
		value, err := content()
		var body []byte
		if err == nil {
			body, err = json.Marshal(value)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Cache-Control", "public, max-age=3600")
		_, _ = w.Write(body) // the client has gone, or not
	})
}
