"""The hub of `weights_server` with the requests that create repositories and upload folders."""
import base64
import json

from weights_server import Request, WeightsServer


class UploadServer(WeightsServer):
    """A hub that takes uploads.

    Attributes:
        repositories: repository -> whether it is private.
        refused: HTTP status of the answer to a commit, or 0 to accept it.
    """

    def __init__(self):
        super().__init__()
        self.repositories, self.refused = {}, 0

    def __enter__(self):
        super().__enter__()
        self._server.RequestHandlerClass.do_POST = _post
        return self


def _post(handler):
    site, path = handler.site, handler.path.partition('?')[0]
    body = handler.rfile.read(int(handler.headers['Content-Length']))
    handler.request_record = Request('POST', path, {key.lower(): value for key, value in handler.headers.items()})
    site.requests.append(handler.request_record)
    if site.token and handler.headers.get('Authorization') != f'Bearer {site.token}':
        answer, status = {'error': 'Invalid username or password.'}, 401
    elif path == '/api/repos/create':
        answer, status = _create(site, json.loads(body)), 200
    elif path == '/api/validate-yaml':                # the front matter of a card
        answer, status = {'errors': [], 'warnings': []}, 200
    elif '/preupload/' in path:
        answer = {'files': [dict(path=file['path'], uploadMode='regular', shouldIgnore=False)
                            for file in json.loads(body)['files']]}
        status = 200
    else:
        repo = path.removeprefix('/api/models/').partition('/commit/')[0]
        answer, status = ({'error': 'over quota'}, site.refused) if site.refused else (_commit(site, repo, body), 200)
    handler._send(status, json.dumps(answer).encode(), {'Content-Type': 'application/json'})


def _create(site, wanted):
    repo = '/'.join(filter(None, (wanted.get('organization'), wanted['name'])))
    # Older versions of huggingface_hub send `private`.
    site.repositories.setdefault(repo, wanted.get('visibility') == 'private' or bool(wanted.get('private')))
    site.models.setdefault(repo, {})
    return {'url': f'{site.url}/{repo}', 'name': repo}


def _commit(site, repo, body):
    """Add the files of a commit, which come as lines of JSON."""
    files = dict(site.models[repo].get('main', {}).get('files', {}))
    for line in map(json.loads, body.splitlines()):
        if line['key'] == 'file':
            files[line['value']['path']] = base64.b64decode(line['value']['content'])
    commit = site.add_model(repo, files)
    return {'commitUrl': f'{site.url}/{repo}/commit/{commit}', 'commitOid': commit, 'success': True}
